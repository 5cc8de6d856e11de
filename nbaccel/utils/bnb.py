"""Models that bitsandbytes quantises, for programs that ask: ``accelerate.utils.bnb``. It defines nothing.

Runs in ranks and scripts.
"""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["BnbQuantizationConfig", "load_and_quantize_model"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.big_models.quantising import BnbQuantizationConfig, load_and_quantize_model
