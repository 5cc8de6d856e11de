"""The face of local SGD: the name that programs import from ``accelerate.local_sgd``. It defines nothing."""

from __future__ import annotations

from nbaccel.train.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
