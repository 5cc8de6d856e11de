"""Let sharded values leave this rank without a collective, and count the steps that they have had. Runs in ranks.

The rows of all ranks make one tensor only if all ranks have taken the same optimizer steps. After an error or a stop
they may not have, so each rank reports its count; the notebook compares them (`JoinedTensors`).
"""

from __future__ import annotations

from typing import Any

from nbaccel.launching.ipc.import_hooks import when_loaded
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

    def install(self) -> None:
        """Count steps from now on."""
        when_loaded({"torch.optim.optimizer": self._hook})

    def facts(self, status: str, results: Results) -> dict[str, Any]:
        """Return a `RowsReport` as JSON."""
        return {"rows": RowsReport(self._steps, self._is_inside, SPOILT if self._cut.is_spoilt else "")._asdict()}

    def _hook(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(self._before_step)
        module.register_optimizer_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _steps_shards(optimizer):
            self._is_inside = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _steps_shards(optimizer):
            self._steps += 1
            self._is_inside = False


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
