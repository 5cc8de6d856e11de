"""Collectives over nested containers, and what happens when ranks call different ones."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbaccel import Accelerator, CollectiveMismatch, PartialState
from nbaccel.base.events import CollectiveEntered, Event, ExchangeLeft, Waiting, outlet
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.collectives import CHECKED_CALLS, Fingerprints
from nbaccel.utils import broadcast, broadcast_object_list, gather_object, pad_across_processes, reduce
from nbaccel.utils.operations import copy_tensor_to_devices

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    hidden: Any


def _gathered() -> dict[str, Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    value = {"scalar": torch.tensor(rank), "pair": Pair(torch.full((2, 1), rank), [torch.tensor([rank])])}
    whole = accelerator.gather(value)
    output = accelerator.gather(Output(torch.full((1,), float(rank)), (torch.ones(1),)))
    assert isinstance(whole["pair"], Pair)
    assert isinstance(output, Output)
    assert isinstance(output.hidden, tuple)
    return {
        "scalar": whole["scalar"].tolist(),
        "left": whole["pair"].left.tolist(),
        "right": whole["pair"].right[0].tolist(),
        "logits": output.logits.tolist(),
    }


def test_gather_keeps_types_and_makes_scalars_one_dimensional() -> None:
    expected = {"scalar": [0, 1], "left": [[0], [0], [1], [1]], "right": [0, 1], "logits": [0.0, 1.0]}
    assert run_ranks(2, _gathered) == [expected, expected]


def _dtypes() -> list[bool]:
    accelerator = Accelerator()
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    kinds += [torch.uint8, torch.int8, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn]
    one = [torch.ones(2, 2).to(kind).t() for kind in kinds]
    both = [torch.ones(()).to(kind) for kind in kinds]
    return [
        whole.dtype == kind
        and whole.shape == (4, 2)
        and bool((whole.float() == 1).all() if not kind.is_complex else (whole == 1).all())
        and sent.dtype == kind
        and sent.shape == ()
        and complex(sent.to(torch.complex64)) == 1
        for whole, sent, kind in zip(accelerator.gather(one), broadcast(both, 1), kinds, strict=True)
    ]


def _sums() -> dict[str, Any]:
    accelerator = Accelerator()
    kinds = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint16, torch.uint8]
    kinds += [torch.bool, torch.complex64, torch.float8_e4m3fn]
    ones = {str(kind).removeprefix("torch."): torch.ones(3).to(kind) for kind in kinds}
    return {
        name: (total.dtype, complex(total[0].to(torch.complex64))) for name, total in accelerator.reduce(ones).items()
    }


def test_every_dtype_can_be_added_and_booleans_are_counted() -> None:
    for sums in run_ranks(2, _sums):
        assert {value for _, value in sums.values()} == {2 + 0j}
        assert sums.pop("bool")[0] is torch.int64
        assert {name: str(dtype) for name, (dtype, _) in sums.items()} == {name: f"torch.{name}" for name in sums}


def _booleans() -> tuple[Any, ...]:
    accelerator = Accelerator()
    flag = torch.tensor([accelerator.is_main_process, True])
    return tuple(accelerator.reduce(flag, kind).tolist() for kind in ("sum", "mean", "max", "min", "none"))


def test_booleans_are_counted_averaged_and_compared() -> None:
    first, second = run_ranks(2, _booleans)
    assert first == ([1, 2], [0.5, 1.0], [True, True], [False, True], [True, True])
    assert second[4] == [False, True]


def _default_reductions() -> list[float]:
    mine = torch.tensor(1.0 + PartialState().process_index)
    return [float(value) for value in (reduce(mine), Accelerator().reduce(mine), PartialState().reduce(mine))]


def test_the_functions_default_is_the_mean_and_the_methods_the_sum_as_in_accelerate() -> None:
    assert run_ranks(2, _default_reductions) == [[1.5, 3.0, 3.0]] * 2


def _mean_of_integers() -> tuple[str, float]:
    mean = Accelerator().reduce(torch.tensor(PartialState().process_index), "mean")
    return str(mean.dtype), float(mean)


def test_a_mean_of_integers_is_a_fraction() -> None:
    assert run_ranks(2, _mean_of_integers) == [("torch.float32", 0.5)] * 2


def test_gather_takes_every_dtype_also_without_contiguous_memory() -> None:
    assert all(all(rank) for rank in run_ranks(2, _dtypes))


def _reduced() -> tuple[Any, ...]:
    accelerator = Accelerator()
    mine = torch.tensor([1.0, 2.0]) * (1 + accelerator.process_index)
    results = [accelerator.reduce(mine, kind).tolist() for kind in ("sum", "mean", "max", "min")]
    scaled = accelerator.reduce({"x": mine}, scale=0.5)["x"].tolist()
    return (*results, scaled, mine.tolist())


def test_reduce_knows_its_operations_and_does_not_change_its_input() -> None:
    first, second = run_ranks(2, _reduced)
    assert first[:5] == ([3.0, 6.0], [1.5, 3.0], [2.0, 4.0], [1.0, 2.0], [1.5, 3.0])
    assert (first[5], second[5]) == ([1.0, 2.0], [2.0, 4.0])


def test_an_unknown_reduction_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="reduction must be one of 'sum', 'mean', 'max', 'min', 'none', got 'product'"):
        Accelerator().reduce(torch.ones(1), "product")


def _empty() -> tuple[Any, ...]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    rows = torch.full((2 * rank, 3), float(rank))
    nobody = torch.empty(0, 3)
    return (
        accelerator.gather(nobody).shape,
        accelerator.reduce(nobody).shape,
        broadcast(nobody).shape,
        accelerator.pad_across_processes(rows, pad_index=7).tolist(),
        accelerator.collectives.gather_uneven(rows).tolist(),
        accelerator.collectives.gather_uneven({"x": nobody, "y": rows[:, 0]})["y"].tolist(),
        accelerator.gather_for_metrics([] if rank == 0 else ["text"]),
    )


def test_a_rank_without_rows_takes_part_like_any_other() -> None:
    first, second = run_ranks(2, _empty)
    assert first[:3] == ((0, 3),) * 3
    assert first[3] == [[7.0] * 3] * 2
    assert first[4:] == second[4:] == ([[1.0] * 3] * 2, [1.0, 1.0], ["text"])


def _with_nothing() -> Any:
    value = (torch.ones(1), None, {"x": None})
    accelerator = Accelerator()
    whole, nothing, nested = accelerator.gather_for_metrics(value)
    return whole.tolist(), nothing, nested, accelerator.reduce(value)[1]


def test_none_stays_none_among_tensors() -> None:
    assert run_ranks(2, _with_nothing)[0] == ([1.0, 1.0], None, {"x": None}, None)


def test_one_process_gets_back_what_it_gave() -> None:
    accelerator = Accelerator()
    value = {"x": torch.ones(())}
    assert accelerator.gather(value) is value
    assert accelerator.gather_for_metrics(["text"]) == ["text"]
    assert accelerator.pad_across_processes(value) is value
    accelerator.wait_for_everyone()


def _padded() -> tuple[Any, Any]:
    accelerator = Accelerator()
    mine = torch.full((1, accelerator.process_index + 1), 5)
    padded = accelerator.pad_across_processes(mine, dim=1, pad_index=-1)
    first = accelerator.pad_across_processes(mine, dim=1, pad_first=True)
    return accelerator.gather(padded).tolist(), accelerator.gather(first).tolist()


def test_pad_fills_up_to_the_longest_rank() -> None:
    assert run_ranks(2, _padded)[0] == ([[5, -1], [5, 5]], [[0, 5], [5, 5]])


def _pad_a_mixture() -> list[Any]:
    rank = PartialState().process_index
    value = {"a": torch.ones(1 + rank, 2, dtype=torch.bool), "b": (torch.ones(2, 1 + rank), torch.tensor(5))}
    padded = pad_across_processes(value, dim=-1, pad_index=0)
    rows = pad_across_processes(value, dim=0, pad_index=1)
    return [padded["a"].shape, padded["b"][0].tolist(), padded["b"][1].tolist(), rows["a"].tolist()]


def test_each_tensor_is_padded_to_the_longest_of_its_own_kind() -> None:
    first, second = run_ranks(2, _pad_a_mixture)
    assert first == [(1, 2), [[1.0, 0.0]] * 2, 5, [[True, True]] * 2]
    assert second == [(2, 2), [[1.0, 1.0]] * 2, 5, [[True, True]] * 2]


def _broadcast() -> tuple[list[int], list[Any], bool]:
    state = PartialState()
    mine = torch.tensor(state.process_index)
    values = broadcast([mine], from_process=1)
    objects: list[Any] = [f"from {state.process_index}", {"x": mine}, None]
    returned = broadcast_object_list(objects, from_process=1)
    return [int(value) for value in values], objects, returned is objects


def test_broadcast_gives_the_sources_values_and_lists_change_in_place() -> None:
    for values, objects, is_same in run_ranks(2, _broadcast):
        assert values == [1]
        assert objects == ["from 1", {"x": torch.tensor(1)}, None]
        assert is_same


def test_a_source_that_does_not_exist_is_refused() -> None:
    def refused() -> str:
        with pytest.raises(ValueError, match="from_process") as caught:
            broadcast(torch.ones(1), from_process=2)
        with pytest.raises(ValueError, match="from_process"):
            broadcast_object_list([1], from_process=-1)
        return str(caught.value)

    assert run_ranks(2, refused)[0] == "from_process must lie in 0..1, got 2"


def _objects() -> dict[str, Any]:
    rank = PartialState().process_index
    return {
        "list": gather_object([f"text {rank}"]),
        "dict": gather_object({"pred": rank, "text": [f"t{rank}"]}),
        "word": gather_object("ab"),
        "number": gather_object(rank),
        "uneven": gather_object(list(range(rank * 3))),
        "different": gather_object([1] if rank else None),
        "pair": gather_object(Pair([rank], rank)),
        "tensor": gather_object(torch.full((rank + 1,), rank)).tolist(),
        "big": len(gather_object(["x" * 300_000])),
        "strings": PartialState().gather_for_metrics({"text": ["a", "b"], "id": ["c", "d"]}),
    }


def test_objects_of_all_ranks_are_joined_by_what_they_are() -> None:
    assert (
        run_ranks(2, _objects)
        == [
            {
                "list": ["text 0", "text 1"],
                "dict": {"pred": [0, 1], "text": ["t0", "t1"]},
                "word": ["ab", "ab"],
                "number": [0, 1],
                "uneven": [0, 1, 2],
                "different": [None, [1]],
                "pair": Pair([0, 1], [0, 1]),
                "tensor": [0, 1, 1],
                "big": 2,
                "strings": {"text": ["a", "b", "a", "b"], "id": ["c", "d", "c", "d"]},
            }
        ]
        * 2
    )


def _unpicklable(call: str) -> str:
    state = PartialState()
    rank = state.process_index
    mine = (lambda: None) if rank == 1 else "text"
    with pytest.raises(TypeError) as caught:
        gather_object(mine) if call == "gather_object" else broadcast_object_list([mine], from_process=1)
    assert int(reduce(torch.ones(()), "sum")) == 2  # the group is still good
    return str(caught.value)


@pytest.mark.parametrize("call", ["gather_object", "broadcast_object_list"])
def test_an_object_that_cannot_be_sent_is_the_same_error_on_every_rank(call: str) -> None:
    first, second = run_ranks(2, _unpicklable, call)
    assert first == second
    assert first.startswith(f"{call} sends what can be pickled, and one rank's object cannot be:\n  rank 1: ")
    assert "lambda" in first


def _metrics(use_gather_object: bool) -> list[Any]:
    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(5), batch_size=2))
    seen: list[Any] = []
    for batch in loader:
        value = [tensor[None] for tensor in batch] if use_gather_object else {"ids": batch}
        whole = accelerator.gather_for_metrics(value, use_gather_object=use_gather_object)
        seen += [int(tensor) for tensor in whole] if use_gather_object else whole["ids"].tolist()
    return seen


@pytest.mark.parametrize("use_gather_object", [False, True])
def test_metrics_see_each_sample_once(use_gather_object: bool) -> None:
    assert run_ranks(2, _metrics, use_gather_object) == [[0, 1, 2, 3, 4]] * 2


def test_numbers_of_a_rank_in_another_exchange_are_not_shown_as_text() -> None:
    transport: Any = SimpleNamespace(calls=13)
    numbers = torch.linspace(0, 1, 40).numpy().tobytes().decode(errors="replace")
    message = Fingerprints(transport, False, ()).mismatch(["wait_for_everyone", numbers])
    assert "  rank 0: wait_for_everyone\n  rank 1: an exchange of numbers, such as gradients\n" in message


def _mismatch(kind: str) -> str:
    accelerator = Accelerator()
    rank = accelerator.process_index
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        if kind == "shape":
            accelerator.gather({"x": torch.ones(2 + rank, 3)})
        elif kind == "objects":
            gather_object(["text"]) if rank else broadcast_object_list([1, 2])
        elif kind == "structure":
            accelerator.gather([torch.ones(1)] if rank else [torch.ones(1), None])
        elif kind == "operation":
            accelerator.gather(torch.ones(2)) if rank else accelerator.reduce(torch.ones(2))
        elif kind == "padding":
            accelerator.pad_across_processes(torch.ones((2 + rank,) * (1 + rank)))
        elif kind == "debug":
            accelerator.state.debug = rank == 0
        elif kind == "barrier":
            accelerator.wait_for_everyone() if rank else accelerator.gather(torch.ones(2))
        else:
            accelerator.gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    assert time.monotonic() - began < 10
    accelerator.wait_for_everyone()  # nothing was exchanged, so the group is still good
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        ("shape", ["rank 0: gather {x: float32[2, 3]}", "rank 1: gather {x: float32[3, 3]}"]),
        ("operation", ["rank 0: reduce sum float32[2]", "rank 1: gather float32[2]"]),
        ("barrier", ["rank 0: gather float32[2]", "rank 1: wait_for_everyone"]),
        ("dtype", ["rank 0: gather float32[2]", "rank 1: gather float64[2]"]),
        ("objects", ["rank 0: broadcast_object_list of 2 from 0", "rank 1: gather_object"]),
        ("padding", ["rank 0: pad_across_processes along 0 float32[any]", "along 0 float32[any, any]"]),
        ("debug", ["rank 0: debug = True", "rank 1: debug = False"]),
        ("structure", ["rank 0: gather {0: float32[1], 1: NoneType}", "rank 1: gather {0: float32[1]}"]),
    ],
)
def test_different_calls_are_an_error_on_every_rank_that_names_both_sides(kind: str, sides: list[str]) -> None:
    for message in run_ranks(2, _mismatch, kind):
        assert all(side in message for side in sides)
        assert "call 1 of this process group" in message
        assert "pad_across_processes first" in message


def _late_mismatch(debug: bool, is_set_later: bool = False) -> int:
    os.environ["ACCELERATE_DEBUG_MODE"] = str(int(debug and not is_set_later))
    accelerator = Accelerator()
    for _ in range(CHECKED_CALLS - is_set_later):
        accelerator.reduce(torch.ones(1))
    if is_set_later:
        accelerator.state.debug = debug  # a call itself
    assert accelerator.state.debug is debug
    if not debug:
        return accelerator.state.collectives.calls
    with pytest.raises(CollectiveMismatch):
        accelerator.gather(torch.ones(1 + accelerator.process_index))
    return accelerator.state.collectives.calls


def test_the_first_calls_are_checked_and_in_debug_mode_all() -> None:
    assert run_ranks(2, _late_mismatch, False) == [CHECKED_CALLS] * 2
    assert run_ranks(2, _late_mismatch, True) == [CHECKED_CALLS + 1] * 2
    assert run_ranks(2, _late_mismatch, True, True) == [CHECKED_CALLS + 1] * 2


def _copied() -> tuple[list[float], str, str]:
    state = PartialState()
    rank, texts = state.process_index, []
    copied = copy_tensor_to_devices(torch.tensor([1.5, 2.5]) if rank == 1 else None)
    for mine in (None, torch.ones(rank)):
        with pytest.raises(ValueError, match="copies the tensor of one rank") as caught:
            copy_tensor_to_devices(mine)
        texts.append(str(caught.value))
    return copied.tolist(), *texts


def test_the_tensor_of_one_rank_is_copied_to_the_others_which_do_not_know_its_shape() -> None:
    for copied, by_none, by_both in run_ranks(2, _copied):
        assert copied == [1.5, 2.5]
        assert "and none has one: the other ranks call it without a tensor" in by_none
        assert "and ranks 0, 1 have one" in by_both


def _gather_a_mixture() -> str:
    with pytest.raises(TypeError) as caught:
        Accelerator().gather({"x": torch.ones(1), "y": "text"})
    return str(caught.value)


def test_gather_of_tensors_and_something_else_says_what_takes_it() -> None:
    for message in run_ranks(2, _gather_a_mixture):
        assert "got str. gather_for_metrics takes any picklable object" in message


def _waiting() -> tuple[list[str], int, float]:
    state = PartialState()
    heard: list[Event] = []
    state.wait_for_everyone()
    with outlet(heard.append):
        if state.process_index:
            time.sleep(1.2)
        began = time.monotonic()
        state.gather(torch.ones(2))
    waited = [f"{event.call}, {event.seconds:.1f} s" for event in heard if isinstance(event, Waiting)]
    return waited, sum(isinstance(event, CollectiveEntered) for event in heard), time.monotonic() - began


def test_a_rank_that_waits_says_so_twice_a_second_and_goes_on() -> None:
    first, second = run_ranks(2, _waiting)
    call = "gather float32[2] (call 2 of this process group)"
    assert first[0][:2] == [f"{call}, 0.5 s", f"{call}, 1.0 s"]
    assert first[1] == second[1] == 1
    assert second[0] == []


def _deserted() -> str:
    state = PartialState()
    state.wait_for_everyone()

    def answer(event: Event) -> None:
        if isinstance(event, Waiting):
            raise CollectiveMismatch(f"{event.call}: nobody comes")

    if state.process_index:
        return ""
    with outlet(answer), pytest.raises(CollectiveMismatch) as caught:
        state.reduce({"loss": torch.ones(())})
    return str(caught.value)


def test_a_listener_that_knows_better_ends_the_wait() -> None:
    assert run_ranks(2, _deserted)[0] == "reduce sum {loss: float32[]} (call 2 of this process group): nobody comes"


def _interrupted() -> float:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index:
        return 0.0
    began = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        state.wait_for_everyone()
    return time.monotonic() - began


def test_an_interrupt_reaches_a_rank_inside_a_collective() -> None:
    assert run_ranks(2, _interrupted)[0] < 1.5


def _goes_on_after_an_alarm(kind: type[Exception]) -> list[str]:
    state = PartialState()
    state.wait_for_everyone()
    heard: list[Event] = []
    if state.process_index:
        return []

    def time_is_up(number: int, frame: Any) -> None:
        raise kind("time is up")

    signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with outlet(heard.append):
        with pytest.raises(kind, match="time is up"):
            state.gather(torch.ones(2))
        with pytest.raises(CollectiveMismatch) as caught:
            state.wait_for_everyone()
        with pytest.raises(CollectiveMismatch, match="half-way"):
            state.reduce(torch.ones(2))
    left = [event.call for event in heard if isinstance(event, ExchangeLeft)]
    return [
        *left,
        str(caught.value).partition(" half-way")[0],
        str(sum(type(each) is CollectiveEntered for each in heard)),
    ]


@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError])
def test_a_rank_that_goes_on_after_an_exception_in_a_collective_enters_no_other(kind: type[Exception]) -> None:
    left, error, entered = run_ranks(2, _goes_on_after_an_alarm, kind)[0]
    assert left == "gather float32[2]"
    assert error == f"this rank goes on after an exception ({kind.__name__}: time is up) has ended its {left}"
    assert entered == "1", "nothing was sent for the others"


def _goes_on_after_an_error_of_all() -> float:
    state = PartialState()
    with pytest.raises(TypeError, match="gather_object sends what can be pickled"):
        gather_object([threading.Lock()])
    with pytest.raises(TypeError, match="takes tensors"):
        state.gather([torch.ones(1), "text"])
    return float(state.reduce(torch.ones(())))


def test_an_error_that_all_ranks_raise_alike_leaves_no_collective_half_way() -> None:
    assert run_ranks(2, _goes_on_after_an_error_of_all) == [2.0, 2.0]


def _prepares_another_model() -> str:
    accelerator = Accelerator()
    for _ in range(CHECKED_CALLS + 1):
        accelerator.wait_for_everyone()
    with pytest.raises(CollectiveMismatch) as caught:
        accelerator.prepare(torch.nn.Linear(1, 1, bias=accelerator.is_main_process))
    return str(caught.value)


def test_ranks_that_prepare_different_models_hear_of_it_however_late() -> None:
    for message in run_ranks(2, _prepares_another_model):
        assert "  rank 0: prepare Linear of 2 parameters\n  rank 1: prepare Linear of 1 parameters" in message
        assert "Rank 0 has parameter bias float32[1], which not all ranks have." in message


def _has_a_buffer_of_its_own(net: torch.nn.Module) -> None:
    net.register_buffer("seen", torch.zeros(3, dtype=torch.float64))


def _has_a_larger_buffer(net: torch.nn.Module) -> None:
    net[1].running_mean = torch.zeros(5)


def _freezes_one(net: torch.nn.Module) -> None:
    net[0].bias.requires_grad_(False)


def _casts_one(net: torch.nn.Module) -> None:
    net[0].double()


def _has_another_order(net: torch.nn.Module) -> None:
    net[0].weight = net[0]._parameters.pop("weight")


UNLIKE: dict[Callable[[torch.nn.Module], None], str] = {
    _has_a_buffer_of_its_own: "Rank 0 has buffer seen float64[3], which not all ranks have. Build the same model",
    _has_a_larger_buffer: "Rank 0 has buffer 1.running_mean float32[5], which not all ranks have. Rank 1 has buffer",
    _freezes_one: "Rank 0 has frozen parameter 0.bias float32[4], which not all ranks have. Rank 1 has parameter",
    _casts_one: "Rank 0 has parameter 0.weight float64[4, 4], parameter 0.bias float64[4], which not all ranks have.",
    _has_another_order: "They have the same tensors in another order, from the 1. on: parameter 0.bias float32[4] in",
}


def _prepares_an_unlike_model(change: Callable[[torch.nn.Module], None], strategy: str) -> str:
    accelerator = Accelerator(strategy=strategy)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    if accelerator.is_main_process:
        change(net)
    with pytest.raises(CollectiveMismatch) as caught:
        accelerator.prepare(net)
    accelerator.prepare(torch.nn.Linear(1, 1))  # nothing was exchanged
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("change", UNLIKE)
def test_what_models_of_the_ranks_have_unlike_is_named_before_torch_exchanges_it(
    change: Callable[[torch.nn.Module], None], strategy: str
) -> None:
    """A buffer that one rank alone has would end the other process by SIGABRT, in gloo."""
    for message in run_ranks(2, _prepares_an_unlike_model, change, strategy):
        assert UNLIKE[change] in message


def _prepares_a_frozen_model_with_a_buffer_of_its_own() -> int:
    accelerator = Accelerator()
    net = torch.nn.Linear(1, 1).requires_grad_(False)
    net.register_buffer("own", torch.zeros(1 + accelerator.process_index))
    return len(accelerator.prepare(net).own)


def test_a_model_that_nothing_is_exchanged_of_may_differ() -> None:
    assert run_ranks(2, _prepares_a_frozen_model_with_a_buffer_of_its_own) == [1, 2]


class Lost:
    """A collective whose peer has gone."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> None:
        raise RuntimeError("Connection closed by peer")


def _lost() -> list[str]:
    state = PartialState()
    state.gather(torch.ones(1))
    with pytest.raises(RuntimeError, match="closed by peer") as caught:
        state.collectives._transport._finish(Lost())
    return caught.value.__notes__


def test_a_connection_that_is_lost_says_in_which_call() -> None:
    assert run_ranks(2, _lost)[0] == [
        "this rank was in gather float32[1] (call 1 of this process group); a peer that is lost has left it, or died"
    ]
