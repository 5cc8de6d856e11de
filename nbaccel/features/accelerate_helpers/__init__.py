"""Accelerate's helpers: what programs import from ``accelerate.utils``, ``data_loader``, ``logging`` and ``launchers``.

They hook in as the names of these modules of nbaccel, which define nothing, and as `notebook_launcher`; no part of
nbaccel uses one. Run in any process. Import `launching`, `train`, `options` and `base`.
"""
