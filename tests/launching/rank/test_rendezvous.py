"""How ranks meet: groups that are destroyed and made again, in one file."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from nbaccel.base.world import World
from nbaccel.launching.rank.process_setup import meet_in_file
from nbaccel.testing import run_ranks


def _two_groups(path: str) -> list[float]:
    meet_in_file(path, World.from_env())
    sums = []
    for _ in range(2):
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
        dist.destroy_process_group()
    gc.collect()  # the stores are gone now, in every rank
    return sums


def test_the_file_outlives_every_group_made_in_it(tmp_path: Path) -> None:
    # torch removes a store's file with the last rank that drops it; a faster rank may be in the next group by then,
    # whose keys would be lost: one hang in about 150 groups.
    path = tmp_path / "store"
    assert run_ranks(2, _two_groups, os.fspath(path)) == [[2.0, 2.0], [2.0, 2.0]]
    assert path.exists()


def _is_left_of_the_first_group(path: str) -> bool:
    meet_in_file(path, World.from_env())
    (first, *_), (second, *_) = (next(rendezvous("env://")) for _ in range(2))
    first.set("address", "of a group that is gone")
    return second.check(["address"])


def test_a_group_that_is_made_again_does_not_find_the_addresses_of_the_one_before(tmp_path: Path) -> None:
    assert run_ranks(1, _is_left_of_the_first_group, os.fspath(tmp_path / "store")) == [False]
