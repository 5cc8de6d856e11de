"""Criteria 23 to 25: Accelerate's signature and semantics, the sizes of later calls, and what is alive in between."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nbaccel import Accelerator, NoBatchSizeFits, find_executable_batch_size, utils
from nbaccel.base.events import OutOfMemory, outlet
from nbaccel.testing import MemLimit


def test_utils_show_the_same_function() -> None:
    assert utils.find_executable_batch_size is find_executable_batch_size


def _halving(state: dict[str, int]) -> Callable[[], int]:
    def reduce() -> int:
        state["size"] //= 2
        state["calls"] = state.get("calls", 0) + 1
        return state["size"]

    return reduce


def _decorated(form: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    if form == "call":
        return find_executable_batch_size(function, **options)
    return find_executable_batch_size(**options)(function)


@pytest.mark.parametrize("form", ["call", "decorator"])
def test_23_reduce_batch_size_fn_is_honoured_in_both_forms(form: str) -> None:
    state = {"size": 100}
    tried = []

    def train(batch_size: int, model: str, *, epochs: int) -> tuple[int, str, int]:
        tried.append(batch_size)
        if batch_size > 30:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size, model, epochs

    search = _decorated(form, train, starting_batch_size=100, reduce_batch_size_fn=_halving(state))
    assert search("net", epochs=3) == (25, "net", 3)
    assert tried == [100, 50, 25]
    assert state["calls"] == 2


def test_23_without_arguments_it_starts_with_128() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> int:
        """Train."""
        return batch_size

    assert train() == 128
    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_23_a_batch_size_in_the_call_is_refused() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str, epochs: int = 1) -> None: ...

    with pytest.raises(
        TypeError,
        match=r"train\(\) was called with 64 as its batch size, .* Leave it out: train\(model='net', epochs=2\)",
    ):
        train(64, "net", 2)


def _yields(batch_size: int) -> Iterator[int]:
    yield batch_size


async def _waits(batch_size: int) -> int:
    return batch_size


async def _waits_and_yields(batch_size: int) -> AsyncIterator[int]:
    yield batch_size


class _Yields:
    def __call__(self, batch_size: int) -> Iterator[int]:
        yield batch_size


@pytest.mark.parametrize(
    ("function", "is_what"),
    [
        (_yields, "_yields is a generator function"),
        (functools.partial(_yields), "partial is a generator function"),
        (_Yields(), "_Yields is a generator function"),
        (_waits_and_yields, "_waits_and_yields is a generator function"),
        (_waits, "_waits is a coroutine function"),
    ],
    ids=["generator", "partial", "object", "async generator", "coroutine"],
)
def test_a_function_whose_body_runs_after_its_call_is_named_where_it_is_decorated(function: Any, is_what: str) -> None:
    said = rf"{is_what}, so its body runs after the call, .* returns what it has made"
    with pytest.warns(UserWarning, match=said) as warned:
        train = find_executable_batch_size(function, starting_batch_size=4)
    assert warned[0].filename == __file__
    with pytest.raises(TypeError, match=said):
        train()


def test_23_a_function_without_arguments_is_refused() -> None:
    @find_executable_batch_size
    def train() -> None: ...

    with pytest.raises(TypeError, match=r"train\(\) takes no arguments: its first one must be the batch size"):
        train()


def test_23_any_number_of_arguments_goes_to_a_function_that_takes_them() -> None:
    @find_executable_batch_size
    def train(batch_size: int, *rest: int) -> tuple[int, ...]:
        return rest

    assert train(1, 2, 3) == (1, 2, 3)


def test_23_wrong_arguments_are_the_function_own_error() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str) -> None: ...

    with pytest.raises(TypeError, match=r"train\(\) missing 1 required positional argument: 'model'"):
        train()


@pytest.mark.parametrize("error", [ValueError("labels"), RuntimeError("we ran out of memory. sorry")])
def test_23_other_errors_are_the_caller_business(error: Exception) -> None:
    tried = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise error

    with pytest.raises(type(error)) as raised:
        train()
    assert raised.value is error
    assert raised.traceback[-1].name == "train"
    assert tried == [128]


def test_23_nothing_fits_is_a_runtime_error_that_names_the_sizes() -> None:
    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        raise MemoryError("no room")

    with pytest.raises(RuntimeError, match="fits in memory at no batch size: 3, 1 were tried") as raised:
        train()
    assert isinstance(raised.value, NoBatchSizeFits)
    assert raised.value.tried == (3, 1)
    assert "the last error: MemoryError: no room" in str(raised.value)


def test_23_a_start_at_zero_tries_nothing() -> None:
    with pytest.raises(NoBatchSizeFits, match="none were tried"):
        find_executable_batch_size(lambda batch_size: None, 0)()


def test_23_a_rule_that_does_not_reduce_is_refused() -> None:
    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 8)
    def train(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(ValueError, match="it returned 8 after 8 did not fit in memory"):
        train()


def test_24_a_second_call_starts_from_the_size_that_fitted() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 20:
            raise MemoryError
        return batch_size

    assert [train(), train()] == [16, 16]
    assert tried == [64, 32, 16, 16]


def test_24_a_second_call_grows_as_far_as_the_first_one_left_room() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        rows = torch.ones(batch_size, 100)
        rows * 2
        return batch_size

    with MemLimit(64 * 800 - 1) as limit:
        assert train() == 32
        assert train() == 62
        assert train() == 62
        limit.limit_bytes = 40 * 800  # somebody else has come: the size that fitted does so no more
        assert train() == 31
    assert tried == [64, 32, 62, 62, 62, 31]


def test_out_of_memory_is_reported_with_the_size_that_comes_next() -> None:
    seen: list[Any] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        if batch_size == 4:
            raise MemoryError("no room")

    with outlet(seen.append):
        train()
    assert seen == [
        OutOfMemory(0, "forward", micro_batch_size=4, next_size=2, batch_size=4, message="MemoryError: no room")
    ]


def test_a_text_that_may_mean_memory_counts_when_the_memory_was_nearly_full() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        rows = torch.ones(batch_size, 100)
        if batch_size == 4:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
        return len(rows)

    with MemLimit(1700):
        assert train() == 2
    with MemLimit(100_000), pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        find_executable_batch_size(train.__wrapped__, 4)()
    assert tried == [4, 2, 4]


def test_24_after_nothing_fitted_a_later_call_can_succeed() -> None:
    is_free = False

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        if not is_free:
            raise MemoryError
        return batch_size

    with pytest.raises(NoBatchSizeFits):
        train()
    is_free = True
    assert train() == 4


class _Keeper:
    """A program that keeps its errors, as a logger does."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept by the program"])
def test_25_no_tensor_of_the_failed_attempt_is_alive_when_the_next_size_is_asked_for(is_kept: bool) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    resources = _Keeper()

    def reduce() -> int:
        alive.append(sum(tensor() is not None for tensor in made))
        return 1

    def forward(batch: Tensor) -> Tensor:
        hidden = torch.ones(4, requires_grad=True) * batch
        made.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    @find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=reduce)
    def train(batch_size: int) -> int:
        if batch_size == 1:
            return 1
        batch = torch.ones(4)
        made.append(weakref.ref(batch))
        try:
            forward(batch)
        except torch.OutOfMemoryError as error:
            if is_kept:
                resources.errors.append(error)
                _ = [trace.f_locals for trace in _frames(error)]  # as IPython does when it shows one
            raise
        return 0

    assert train() == 1
    assert len(made) == 2
    assert alive == [0]


def _frames(error: BaseException) -> list[Any]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def test_25_the_memory_of_a_failed_attempt_is_back_before_the_next_one() -> None:
    accelerator = Accelerator(cpu=True)
    live = []

    @find_executable_batch_size(starting_batch_size=256)
    def train(batch_size: int) -> int:
        live.append(limit.live_bytes)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        accelerator.backward(model(torch.ones(batch_size, 64)).square().mean())
        optimizer.step()
        return batch_size

    with MemLimit(200_000) as limit:
        assert train() < 256
    assert limit.refusals >= 1
    assert live == [0] * len(live), "the Accelerator, which was made outside, kept what the failed attempt prepared"


def test_an_optimizer_made_outside_is_not_left_with_half_of_its_state() -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    others = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    others.state[others.param_groups[0]["params"][0]] = {"step": torch.ones(())}

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        limit.limit_bytes = 150_000 if batch_size == 8 else None  # the second moments do not fit
        model(torch.ones(batch_size, 100)).mean().backward()
        optimizer.step()
        return batch_size

    with MemLimit() as limit:
        limit.count(model)
        assert train() == 7
    assert limit.refusals == 1
    assert len(optimizer.state) == 2
    assert others.state, "an optimizer that has nothing to do with it lost its state"


def test_state_is_not_kept_alive_by_the_search() -> None:
    class Value: ...

    @find_executable_batch_size
    def train(batch_size: int, value: Value) -> Value:
        return value

    value = Value()
    reference = weakref.ref(value)
    train(value)
    del value
    gc.collect()
    assert reference() is None
