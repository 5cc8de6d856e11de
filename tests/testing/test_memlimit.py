"""`MemLimit`: a device of a few bytes on the CPU."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.nn.parallel import DistributedDataParallel

from nbaccel.testing import MemLimit, run_ranks
from nbaccel.train import PartialState

FLOAT = 4


def test_a_tensor_counts_from_its_making_to_the_death_of_its_last_view() -> None:
    with MemLimit() as limit:
        whole = torch.zeros(10, 10)
        row = whole[3]
        assert limit.live_bytes == 100 * FLOAT
        del whole
        assert limit.live_bytes == 100 * FLOAT, "the row still holds all of it"
        del row
        assert limit.live_bytes == 0
    assert limit.peak_bytes == 100 * FLOAT


def test_what_dies_after_the_block_is_counted_too() -> None:
    with MemLimit() as limit:
        tensor = torch.zeros(10)
    assert limit.live_bytes == 40
    del tensor
    assert limit.live_bytes == 0


def test_what_fits_exactly_fits_and_one_byte_more_does_not() -> None:
    with MemLimit(100) as limit:
        kept = torch.zeros(99, dtype=torch.uint8)
        last = torch.zeros(1, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(1, dtype=torch.uint8)
    assert str(caught.value) == (
        "CPU out of memory. Tried to allocate 1 bytes; MemLimit allows 100 bytes, of which 0 bytes are free."
    )
    assert (limit.live_bytes, limit.refusals) == (len(kept) + len(last), 1)


def test_a_refused_operation_holds_nothing_although_its_traceback_lives() -> None:
    with MemLimit(1000) as limit:
        try:
            torch.zeros(100).cos().repeat(2)  # 400 bytes, 400 more, and 800 that do not fit
        except torch.OutOfMemoryError as error:
            held = error
        assert limit.live_bytes == 0
    assert held.__traceback__ is not None


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_memory_runs_out_at_the_operation_that_asks(place: str) -> None:
    """Byte-exact limits from a run that counts only: just below the peak of each phase."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    batch = torch.randn(16, 32)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step(limit: MemLimit, peaks: dict[str, int]) -> None:
        limit.reset_peak()
        loss = model(batch).square().mean()
        peaks["forward"] = limit.peak_bytes
        loss.backward()
        peaks["backward"] = limit.peak_bytes
        del loss
        limit.reset_peak()
        optimizer.step()
        peaks["optimizer"] = limit.peak_bytes

    peaks: dict[str, int] = {}
    with MemLimit() as limit:
        limit.count(model, batch)
        step(limit, peaks)
    model.zero_grad(set_to_none=True)
    optimizer.state.clear()
    assert limit.live_bytes == sum(p.nbytes for p in model.parameters()) + batch.nbytes
    with MemLimit() as limit:
        limit.count(model, batch)
        if place == "optimizer":  # its state is more than the activations were
            model(batch).square().mean().backward()
        limit.limit_bytes = peaks[place] - 1
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(limit, {})
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    called = {"forward": "model(batch)", "backward": "loss.backward()", "optimizer": "optimizer.step()"}
    assert any(called[place] in line for line in lines)


def test_gradients_and_optimizer_state_that_were_there_can_be_counted() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    limit = MemLimit()
    parameters = 8 * FLOAT
    limit.count(model)
    assert limit.live_bytes == 2 * parameters, "with the gradients"
    limit.count(optimizer, {"again": list(model.parameters())})
    assert limit.live_bytes == 4 * parameters + 2 * FLOAT, "two moments and two step counts; nothing twice"


def test_a_tensor_that_grows_in_place_is_counted_by_what_it_grew() -> None:
    with MemLimit(100) as limit:
        grown = torch.empty(0, dtype=torch.uint8)
        torch.zeros(10, dtype=torch.uint8, out=grown)
        assert limit.live_bytes == 10
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 100 bytes"):
            torch.zeros(110, dtype=torch.uint8, out=grown)


def test_limits_are_nested_and_each_counts() -> None:
    with MemLimit(1000) as outer, MemLimit(100) as inner:
        with pytest.raises(torch.OutOfMemoryError, match="MemLimit allows 100 bytes"):
            torch.zeros(200, dtype=torch.uint8)
        kept = torch.zeros(50, dtype=torch.uint8)
    assert outer.live_bytes == inner.live_bytes == len(kept)


def test_sparse_tensors_and_tensors_without_memory_are_passed_over() -> None:
    with MemLimit(0) as limit:
        torch.empty(10, 10, device="meta").cos()
    with MemLimit() as limit:
        sparse = torch.eye(3).to_sparse()
        assert sparse.layout is torch.sparse_coo
    del sparse
    assert limit.live_bytes == 0


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limit_bytes must be 0 or more, or None to only count; got -1"):
        MemLimit(-1)


def test_ranks_have_limits_of_their_own_and_ddp_counts_too() -> None:
    def train() -> tuple[str, int]:
        state = PartialState()
        with MemLimit(6000 if state.process_index else None) as limit:
            model = DistributedDataParallel(torch.nn.Linear(16, 16))
            first = limit.live_bytes
            try:
                torch.randn(64, 16).exp()
                outcome = "fits"
            except torch.OutOfMemoryError:
                outcome = "does not"
            F.mse_loss(model(torch.ones(1, 16)), torch.zeros(1, 16)).backward()
        return outcome, first

    one, other = run_ranks(2, train)
    assert (one[0], other[0]) == ("fits", "does not")
    # More, for as long as gloo holds its copy of what it sent.
    assert min(one[1], other[1]) >= 2 * 272 * FLOAT, "parameters, and the bucket of as many gradients"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=30))
def test_the_count_is_the_sum_of_what_lives(orders: list[tuple[int, int]]) -> None:
    """Make, look at, copy and drop tensors in any order, under a limit that is often hit."""
    alive: list[torch.Tensor] = []
    with MemLimit(200) as limit:
        for order, size in orders:
            try:
                match order:
                    case 0:
                        alive.append(torch.zeros(size, dtype=torch.uint8))
                    case 1 if alive:
                        alive.append(alive[size % len(alive)][: size // 2])
                    case 2 if alive:
                        alive.append(alive[size % len(alive)].clone())
                    case 3 if alive:
                        del alive[size % len(alive)]
            except torch.OutOfMemoryError:
                pass
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in alive}
            assert limit.live_bytes == sum(storages.values()) <= limit.peak_bytes <= 200
        alive.clear()
        assert limit.live_bytes == 0
