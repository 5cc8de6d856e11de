"""Keep process groups that a program has ended until its rank ends. Runs in ranks.

Before torch 2.8 the destructor of a gloo group joins its threads while it holds Python's lock, for which one of them
may be waiting to drop the last collective's tensors: `dist.destroy_process_group()` then never returns (one of eight
times on a machine under load). The destructor is not called while a reference to the group exists.
https://github.com/pytorch/pytorch/pull/154976
"""

from __future__ import annotations

from typing import Any

from nbaccel.launch.rank.loaded import when_loaded

__all__ = ["keep_ended_groups"]

_kept: list[Any] = []


def keep_ended_groups() -> None:
    """Keep all groups of this process from being destructed. Called once per process."""
    when_loaded({"torch.distributed.distributed_c10d": _keep})


def _keep(c10d: Any) -> None:
    if c10d.torch.__version__ >= "2.8":
        return
    update = c10d._update_default_pg

    def keep_and_update(group: Any) -> None:
        """Keep the groups; called with None while the groups that end are still listed."""
        if group is None:
            _kept.extend(c10d._world.pg_map)
        update(group)

    c10d._update_default_pg = keep_and_update
