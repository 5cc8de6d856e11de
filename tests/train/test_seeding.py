"""One number sets every generator; and rank 0's state may become everybody's."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from nbaccel.testing import run_ranks
from nbaccel.utils import RNGType, set_seed, synchronize_rng_state, synchronize_rng_states


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Put the process's generators back."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])


def _draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.random()), float(torch.rand(()))


def test_a_seed_repeats_the_draws_of_all_three_generators() -> None:
    set_seed(3)
    first = _draw()
    assert _draw() != first
    set_seed(3)
    assert _draw() == first


def test_a_seed_too_large_for_numpy_is_taken() -> None:
    set_seed(2**40 + 3)
    assert numpy.random.random() == numpy.random.RandomState(3).random_sample()


def test_ranks_draw_alike_unless_asked_to_differ() -> None:
    def seeded(device_specific: bool) -> Any:
        set_seed(3, device_specific=device_specific)
        return _draw()

    alike = run_ranks(2, seeded, False)
    assert alike[0] == alike[1]
    differing = run_ranks(2, seeded, True)
    assert differing[0] == alike[0]
    set_seed(4)
    assert differing[1] == _draw()


def test_deterministic_refuses_what_depends_on_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    benchmark = torch.backends.cudnn.benchmark
    try:
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_goes_on_from_the_state_of_rank_0(world_size: int) -> None:
    def synchronized() -> tuple[float, float]:
        from nbaccel import PartialState

        rank = PartialState().process_index
        generator = torch.Generator().manual_seed(rank)
        torch.manual_seed(10 + rank)
        synchronize_rng_states(["torch"])
        synchronize_rng_state(RNGType.GENERATOR, generator)
        return float(torch.rand(())), float(torch.rand((), generator=generator))

    expected = (
        float(torch.rand((), generator=torch.Generator().manual_seed(10))),
        float(torch.rand((), generator=torch.Generator().manual_seed(0))),
    )
    assert run_ranks(world_size, synchronized) == [expected] * world_size


def test_unknown_generators_are_refused() -> None:
    with pytest.raises(ValueError, match="of 'torch', 'cuda', 'generator', got 'tpu'"):
        synchronize_rng_states(["tpu"])
    with pytest.raises(ValueError, match='"generator" needs a generator'):
        synchronize_rng_states(["generator"])
