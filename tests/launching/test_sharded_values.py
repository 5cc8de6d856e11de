"""Functions that return what `fully_shard` has sharded: `notebook_launcher` and `launch` return it whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.errors import ResultsMissing
from nbaccel.launchers import notebook_launcher
from nbaccel.launching.api import launch
from nbaccel.train.distributed.partial_state import PartialState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of torch 2.6 runs on devices with streams only"
    ),
]


def trained(is_returned_by_all: bool = True) -> Any:
    from torch.distributed.fsdp import fully_shard

    rank = PartialState().process_index
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((2, 3), float(step + rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return (model, optimizer, whole) if is_returned_by_all or rank == 0 else None


def test_notebook_launcher_returns_a_sharded_model_whole() -> None:
    model, optimizer, whole = notebook_launcher(trained, num_processes=2)
    assert type(model) is nn.Sequential
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, whole["0.weight"])


def test_the_values_of_all_ranks_share_the_one_tensor_that_they_were_parts_of(start_method: str) -> None:
    run = launch(trained, 2, cpu=True, start_method=start_method)
    (model, _, whole), (other, _, _) = run.values
    assert model is not other
    assert all(torch.equal(value, whole[name]) for name, value in other.state_dict().items())
    assert model[0].weight.data_ptr() == other[0].weight.data_ptr()


def test_a_model_that_one_rank_alone_returns_is_an_error_that_says_so() -> None:
    with pytest.raises(ResultsMissing, match="rank 1 has no rows for value where the others have some: every rank has"):
        launch(trained, 2, (False,), cpu=True)
