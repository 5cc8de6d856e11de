"""Accelerate's helpers: what programs import from ``accelerate.utils`` and ``accelerate.data_loader``, and ask for.

They hook in as the names of `nbaccel.utils`, its modules, and `nbaccel.data_loader`, which define nothing; no part
of nbaccel uses one. Run in any process. Import `train`, `options` and `base`.
"""
