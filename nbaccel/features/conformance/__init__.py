"""`nbaccel.testing.conformance`: small programs that every strategy must train like one process, also those of others.

It hooks in as that module, which shows its names. Runs in test processes and ranks. Imports `testing`, `launching`,
`namespace`, `train` and `base`.
"""

from __future__ import annotations

from nbaccel.features.conformance import strategy_programs

__all__ = ["strategy_programs"]
