"""Memory that a loop's watch has seen stays in its process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nbaccel.train.raw_loop.outside_values import SeenMemory


def test_seen_memory_does_not_travel_as_a_number_that_another_process_would_free() -> None:
    seen = SeenMemory(torch.ones(2).untyped_storage())
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="memory of one process"):
            send(seen)
