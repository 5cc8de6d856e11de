"""Not here: ``accelerate.commands.launch``. Its import says what to use instead. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import LAUNCH, refuse_module

refuse_module("nbaccel.commands.launch", LAUNCH)
