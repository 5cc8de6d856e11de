"""Profiling: runs torch's profiler around a part of the training, one trace per rank. Runs in ranks.

It starts, stops and writes; torch measures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.profiler
from torch.profiler import ProfilerActivity, profile, schedule

from nbaccel.train.faces.control import ProcessControl
from nbaccel.train.handlers import Handlers, ProfileKwargs

__all__ = ["Profiling"]


class Profiling(ProcessControl):
    """The method `profile` of an `Accelerator`."""

    _handlers: Handlers

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profile]:
        """Profile the block; yields ``torch.profiler.profile``, whose ``step()`` ends a step of a schedule.

        profile_handler: by default the `ProfileKwargs` of ``kwargs_handlers``. With its `output_trace_dir`, rank r
        writes ``profile_{r}.json`` there and all ranks wait for each other at the end: collective then.

        >>> from nbaccel import Accelerator
        >>> with Accelerator().profile() as profiler:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> any(row.key == "aten::mm" for row in profiler.key_averages())
        True
        """
        options = profile_handler or self._handlers.profile
        with _make(options) as profiler:
            yield profiler
        if options.output_trace_dir is not None:
            os.makedirs(options.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(options.output_trace_dir, f"profile_{self.process_index}.json"))
            self.wait_for_everyone()


def _make(options: ProfileKwargs) -> profile:
    activities = None
    if options.activities is not None:
        activities = [_activity(name) for name in options.activities]
    return torch.profiler.profile(
        activities=activities,
        schedule=None if options.schedule_option is None else schedule(**options.schedule_option),
        on_trace_ready=options.on_trace_ready,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    )


def _activity(name: str) -> ProfilerActivity:
    known = {activity.name.lower(): activity for activity in ProfilerActivity.__members__.values()}
    if name not in known:
        raise ValueError(f"a profiler activity must be one of {', '.join(map(repr, known))}, got {name!r}")
    return known[name]
