"""Inline start: one rank, in the kernel's own process. For machines that cannot fork, and data too large to copy."""

from __future__ import annotations

import os
import time

from nbaccel.launch.spec import LaunchSpec, load_named

__all__ = ["run_inline"]


def run_inline(spec: LaunchSpec, check: bool) -> tuple[float, BaseException | None]:
    """Run the task here and now; returns the seconds it took, and its error unless `check` lets that through.

    The environment is put back afterwards. Device memory that the task took stays the kernel's.
    """
    began = time.monotonic()
    before = {name: os.environ.get(name) for name in spec.environ}
    os.environ.update(spec.environ)
    error: BaseException | None = None
    try:
        if spec.setup is not None:
            load_named(spec.setup)(spec.task.namespace)
        spec.task.run()
    except Exception as failure:
        if check:
            raise
        error = failure
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return time.monotonic() - began, error
