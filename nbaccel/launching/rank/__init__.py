"""The inside of a rank: its runtime before, around and after the user's code. Runs in ranks.

Imports `launching/ipc`, `launching/libraries`, `namespace`, `options` and `base`.
"""

from __future__ import annotations
