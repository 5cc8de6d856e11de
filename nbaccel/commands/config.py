"""Not here: ``accelerate.commands.config``. Its import says what to use instead. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import LAUNCH, refuse_module

refuse_module("nbaccel.commands.config", LAUNCH)
