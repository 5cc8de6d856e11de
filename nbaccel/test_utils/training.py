"""Not here: ``accelerate.test_utils.training``. Its import says what to use instead. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import FROM_ACCELERATE, refuse_module

refuse_module("nbaccel.test_utils.training", FROM_ACCELERATE)
