"""Cuts one batch of the loader into micro-batches that train the same. Runs in ranks.

It cuts samples and weighs their gradients; a restart after an out-of-memory error uses it, and so does the feature
`micro_batches`. Imports `base` and other folders of `train`.
"""

from __future__ import annotations
