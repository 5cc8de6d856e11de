"""Ranks with different numbers of batches: refused before the first step, or joined."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nbaccel import Accelerator
from nbaccel.testing import run_ranks


def _loader(samples: int = 5) -> DataLoader[Any]:
    return DataLoader(torch.arange(samples, dtype=torch.float32)[:, None], 2)  # type: ignore[arg-type]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.BatchNorm1d(3, momentum=None), torch.nn.Linear(3, 1))


def _refused(way: str) -> tuple[str, int, list[int]]:
    accelerator = Accelerator(even_batches=False)
    model = torch.nn.Linear(1, 1)
    before = model.weight.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, other = accelerator.prepare(model, optimizer, _loader(), _loader(8))
    gone_through = [len(batch) for batch in loader]  # with gradients, as one counts or tokenises
    steps = 0
    with pytest.raises(ValueError, match="different numbers of batches") as caught:
        for batch, _ in zip(loader, other, strict=False):
            loss = model(batch).sum()
            if way == "raw":
                loss.backward()
            else:
                accelerator.backward(loss)
            optimizer.step()
            steps += 1
    assert accelerator.unwrap_model(model).weight.item() == before
    for batch in other:  # what is even is trained on, once the uneven loop was left
        accelerator.backward(model(batch).sum())
    return str(caught.value), steps, gone_through


@pytest.mark.parametrize("way", ["raw", "accelerator"])
def test_uneven_ranks_fail_at_the_first_backward_and_are_told_each_length(way: str) -> None:
    for rank, (message, steps, gone_through) in enumerate(run_ranks(2, _refused, way)):
        assert "(rank 0: 2, rank 1: 1), and rank 0 would wait for the others for ever" in message
        assert "with accelerator.join_uneven_inputs([model]):" in message
        assert steps == 0
        assert gone_through == ([2, 1] if rank == 0 else [2])


def _gathered() -> str:
    accelerator = Accelerator(even_batches=False)
    loader = accelerator.prepare(_loader())
    with torch.no_grad(), pytest.raises(ValueError, match="different numbers of batches") as caught:
        for batch in loader:
            accelerator.gather_for_metrics(batch)
    return str(caught.value)


def test_metrics_of_uneven_ranks_are_refused_at_the_first_batch() -> None:
    for message in run_ranks(2, _gathered):
        assert "(rank 0: 2, rank 1: 1), so a gather in each of them would keep rank 0 waiting" in message
        assert "even_batches=True" in message


def _joined(samples: int, steps_per_window: int) -> tuple[list[float], int]:
    accelerator = Accelerator(gradient_accumulation_steps=steps_per_window)
    warnings.simplefilter("ignore")  # of few samples
    model = _model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), _loader(samples))
    batches = 0
    model.eval()
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert len(loader) == len(list(range(accelerator.process_index * 2, samples, 4)))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
    assert loader.even_batches
    assert not loader.is_joined
    parameters = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    return parameters, batches


def _plain_join(samples: int) -> list[float]:
    accelerator = Accelerator()  # forms the process group
    model = DistributedDataParallel(_model().eval())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(_loader(samples))[accelerator.process_index :: 2]
    with Join([model]):
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


@pytest.mark.parametrize("samples", [2, 5, 9])
def test_joined_ranks_train_as_torchs_join_does(samples: int) -> None:
    (first, batches), (second, other_batches) = run_ranks(2, _joined, samples, 1)
    expected = run_ranks(2, _plain_join, samples)[0]
    assert first == pytest.approx(second)
    assert first == pytest.approx(expected)
    assert batches + other_batches == -(-samples // 2)


@pytest.mark.parametrize("samples", [5, 13, 22])
@pytest.mark.parametrize("steps_per_window", [2, 3])
def test_joined_ranks_may_accumulate(samples: int, steps_per_window: int) -> None:
    (first, _), (second, _) = run_ranks(2, _joined, samples, steps_per_window)
    assert first == pytest.approx(second)


def _infer_alone_after_joining() -> float:
    accelerator = Accelerator(even_batches=False)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), _loader())
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch).sum())
    with torch.no_grad():
        for batch in loader:
            model(batch)  # torch's Join leaves its agreement on: each forward would wait for one of the other rank
    return float(accelerator.reduce(torch.ones(()), "sum"))


def test_ranks_that_have_joined_need_no_longer_forward_together() -> None:
    assert run_ranks(2, _infer_alone_after_joining) == [2, 2]


def _alone() -> int:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(_model(), _loader())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        return len(list(loader))


def test_one_process_joins_nobody() -> None:
    assert _alone() == 3


def _set_later() -> tuple[int, int]:
    accelerator = Accelerator()
    before = accelerator.prepare(_loader(9))
    accelerator.even_batches = False
    after = accelerator.prepare(_loader(9))
    assert not accelerator.even_batches
    return len(before), len(after)


def test_even_batches_may_be_set_for_loaders_to_come() -> None:
    assert run_ranks(2, _set_later) == [(3, 3), (3, 2)]
