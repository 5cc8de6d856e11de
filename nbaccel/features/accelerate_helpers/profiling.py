"""Profiling: runs torch's profiler around a part of the training, one trace per rank. Runs in ranks.

It starts, stops and writes; torch measures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.profiler
from torch.profiler import ProfilerActivity, profile, schedule

from nbaccel.train.step.kwargs_handlers import ProfileKwargs

__all__ = ["profiling"]


@contextmanager
def profiling(options: ProfileKwargs, process_index: int, wait: Callable[[], None]) -> Iterator[profile]:
    """Profile a block, and write its trace where `options` name a folder.

    Args:
        wait: Waits for all ranks; called after the trace was written.
    """
    with _make(options) as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        os.makedirs(options.output_trace_dir, exist_ok=True)
        profiler.export_chrome_trace(os.path.join(options.output_trace_dir, f"profile_{process_index}.json"))
        wait()


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
