"""Let sharded values leave this rank without a collective, and count the steps that they have had. Runs in ranks.

The rows of all ranks make one tensor only if all ranks have taken the same optimizer steps. After an error or a stop
they may not have, so each rank reports its count; the notebook compares them (`JoinedTensors`).
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from nbaccel.launching.ipc.import_hooks import Change, Changes, Replacement
from nbaccel.launching.ipc.rank_part import RankPart
from nbaccel.launching.ipc.spec import Results
from nbaccel.launching.rank.lifetime import SPOILT, CutWatch
from nbaccel.namespace.kind import PLAIN
from nbaccel.namespace.sharded_tensors import RowsReport, ShardedTensors, is_sharded

__all__ = ["ShardedResults", "sharded_tensors"]


class ShardedResults(RankPart):
    """Reports the steps of one rank.

    Counted are the steps of torch's optimizers that have a sharded parameter; updates by hand are not, so those are
    not noticed if ranks differ by one.

    Args:
        cut: Knows whether this rank's rows can be used.
    """

    def __init__(self, cut: CutWatch) -> None:
        self._cut = cut
        self._steps = 0
        self._is_inside = False
        self._counts = False
        me = weakref.proxy(self)  # the kernel, which makes it, drops it at once
        self._changes = Changes([("torch.distributed.device_mesh", functools.partial(_begin_at_first_mesh, me))])

    def install(self) -> None:
        """Count steps from the first mesh on: every sharded tensor lies on one, and a program without any counts none.

        A hook of torch's optimizers runs in every step.
        """
        self._changes.put()

    def count(self) -> None:
        """Count steps from now on."""
        if not self._counts:
            self._counts = True
            optimizers: Any = importlib.import_module("torch.optim.optimizer")
            optimizers.register_optimizer_step_pre_hook(self._before_step)
            optimizers.register_optimizer_step_post_hook(self._after_step)

    def facts(self, status: str, results: Results) -> dict[str, Any]:
        """Return a `RowsReport` as JSON."""
        return {"rows": RowsReport(self._steps, self._is_inside, SPOILT if self._cut.is_spoilt else "")._asdict()}

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _steps_shards(optimizer):
            self._is_inside = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _steps_shards(optimizer):
            self._steps += 1
            self._is_inside = False


def _begin_at_first_mesh(part: ShardedResults, module: Any) -> list[Change]:
    def beginning(makes: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(makes)
        def make(mesh: Any, *args: Any, **kwargs: Any) -> None:
            part.count()
            makes(mesh, *args, **kwargs)

        return make

    return [Replacement([module.DeviceMesh], "__init__", beginning)]


def sharded_tensors(results: Results, world_size: int) -> ShardedTensors | None:
    """Return the sharded tensors of which this rank sends its rows; None in a cell that brings back all changes.

    The names of such a cell's new values are known in one rank only.
    """
    if results.places is not None:
        return None
    values = {**results.parts, **results.values}
    return ShardedTensors(
        {name: values[name] for name in sorted(values) if type(values[name]) not in PLAIN}, world_size
    )


def _steps_shards(optimizer: Any) -> bool:
    return any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"])
