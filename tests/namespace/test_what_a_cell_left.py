"""What of a cell's values can come, and as what: parts that stay in the rank, what knows its rank, functions."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.errors import StayedInRank
from nbaccel.launching.ipc.kernel_state import random_states, set_random_states
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.namespace.inventory import Inventory, ObjectPlace
from nbaccel.namespace.payload import pack_what_can_travel, unpack


class Holder:
    def __init__(self, **has: Any) -> None:
        vars(self).update(has)


def came(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """What arrives of `values`, why others do not, and what the former lack."""
    payload, refused = pack_what_can_travel(values, places=Inventory((), {}), may_lack=values.keys())
    try:
        return unpack(payload.fd), refused, dict(payload.lacks)
    finally:
        os.close(payload.fd)


def test_a_part_that_cannot_travel_is_absent_and_says_so() -> None:
    got, refused, lacks = came({"trainer": Holder(lock=threading.Lock(), best=1)})
    assert (got["trainer"].best, refused, lacks) == (1, {}, {"trainer": ["a lock"]})
    with pytest.raises(StayedInRank, match="a part of trainer stayed in its rank: a lock"):
        got["trainer"].lock.acquire()


def test_a_value_that_is_absent_in_another_does_not_come_by_its_own_name_either() -> None:
    lock = threading.Lock()
    got, refused, _ = came({"holder": Holder(lock=lock), "lock": lock})
    assert list(got) == ["holder"]
    assert refused == {"lock": "a lock cannot be sent to another process"}


def test_random_states_are_those_of_another_process() -> None:
    states = random_states()
    drawn = random.random(), np.random.rand(), torch.rand(1)
    set_random_states(states)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


SMALL, LARGE = 8, 5000


@pytest.mark.parametrize(("size", "comes"), [(SMALL, True), (LARGE, False)])
def test_gradients_come_where_they_are_small(size: int, comes: bool) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "m": torch.nn.Linear(size, size), "torch": torch}
    task = CellTask(CellSource("m(torch.ones(1, m.in_features)).sum().backward()", "Cell In[1]"), namespace)
    task.begin(0)
    task.run()
    results = task.results(0)
    changed = {str(ObjectPlace(*change.token)) for change in results.changes}
    assert changed == ({"m.weight", "m.bias"} if comes else set())
    assert results.facts["unlooked"] == ({} if comes else {"gradients of m": "larger than 64 MB"})


def test_of_a_tensor_of_another_class_it_is_told_that_it_was_written_to() -> None:
    class Own(torch.Tensor):
        pass

    namespace = {"t": torch.zeros(2).as_subclass(Own), "u": torch.zeros(2).as_subclass(Own)}
    inventory = Inventory(namespace, namespace)
    namespace["t"].add_(1)
    assert list(inventory.changes()) == []
    assert inventory.unlooked == {"t": "an Own cannot be compared"}
