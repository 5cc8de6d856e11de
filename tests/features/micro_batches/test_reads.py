"""What a step asks of its device, and when the host waits for the answer: once, at the end of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nbaccel import Accelerator
from nbaccel.features.micro_batches import gradient_buckets, loss_weights
from nbaccel.features.micro_batches.engine import mean_of_parts
from nbaccel.features.micro_batches.gradient_buckets import Buckets, Words, make_words
from nbaccel.features.micro_batches.lent_gradients import StepReport
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.collectives import Collectives
from shortages import Training, batch_of, labelled

_CUDA = torch.device("cuda", 0)


class Event:
    """A stand-in for one of CUDA's, that notes what is asked of it. It is over once it was asked twice."""

    def __init__(self, notes: list[str], name: str) -> None:
        self._notes = notes
        self._name = name
        self._asked = 0

    def record(self, stream: Any) -> None:
        self._notes.append(f"{self._name} recorded")

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def synchronize(self) -> None:
        self._notes.append(f"wait until {self._name}")


def _pretend(notes: list[str], replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Words travel as they do on CUDA; pinned memory is any memory."""
    names = cycle(["left", "arrived"])
    replace(torch.cuda, "Event", lambda: Event(notes, next(names)))
    replace(torch.cuda, "current_stream", lambda device: None)
    replace(gradient_buckets._Pinned, "_lay_out", gradient_buckets._Copied._lay_out)


class Waits(TorchDispatchMode):
    """Notes what waits for a device, were tensors of the training on one: reads, and copies from the host or to it.

    What the block makes out of numbers is on the host.
    """

    def __init__(self, notes: list[str], host: Sequence[Tensor]) -> None:
        super().__init__()
        self._notes = notes
        self._made = list(host)
        self._host = {tensor.untyped_storage().data_ptr() for tensor in host}
        self._functions = _Reads(self)

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host

    def read(self, tensor: Tensor, name: str) -> None:
        if not self.is_on_host(tensor):
            self._notes.append(name)

    def __enter__(self) -> Any:
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._functions.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            self._made.append(result)  # or its address would be given to another one
            self._host.add(result.untyped_storage().data_ptr())
        elif func is torch.ops.aten._local_scalar_dense.default:
            self.read(args[0], "scalar")
        elif func is torch.ops.aten.copy_.default:
            waits = not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking"))
            if waits and self.is_on_host(args[0]) != self.is_on_host(args[1]):
                self._notes.append("copy")
        return result


class _Reads(TorchFunctionMode):
    """The calls of Python that never come to the dispatcher."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "cpu"):
            self._waits.read(args[0], name)
        return func(*args, **(kwargs or {}))


class Spare(torch.nn.Module):
    """A layer and another one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(3, 5)
        self.unused = torch.nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


def _steps(weight: Any, micro_batch_size: int | None, spare: bool) -> tuple[list[str], list[bool]]:
    """What the third step waits for, and which parameters have gradients."""
    notes: list[str] = []
    _pretend(notes)
    lettered: list[gradient_buckets._Pinned] = []

    def make(place: Tensor, count: int, sums_on: torch.device) -> Words:
        lettered.append(gradient_buckets._Pinned(place, count, _CUDA))
        return lettered[-1]

    gradient_buckets.make_words = make
    loss_weights._waits = lambda units: True
    accelerator = Accelerator()
    torch.manual_seed(0)
    net = Spare() if spare else torch.nn.Linear(3, 5)
    model = accelerator.prepare(net)
    accelerator._context.watch.see = lambda loss: loss.detach()  # type: ignore[method-assign]  # it looks at one loss a second
    transport = accelerator.collectives._transport  # type: ignore[attr-defined]
    transport._wait = transport._wait_for_device

    def loss(batch: Any) -> Tensor:
        notes.append("forward")
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"], ignore_index=-100)

    generator = torch.Generator().manual_seed(accelerator.process_index)
    for number in range(3):
        labels = torch.randint(0, 5, (10,), generator=generator)
        labels[8:] = -100
        batch = {"x": torch.randn(10, 3, generator=generator), "labels": labels}
        for parameter in net.parameters():
            parameter.grad = None
        notes.clear()
        pinned = [tensor for each in lettered for tensor in (each._written, each._received)]
        with Waits(notes, pinned):
            accelerator.forward_backward(loss, batch, weight, micro_batch_size=micro_batch_size)
        assert number or "scalar" in notes  # the first step learns the weight of all ranks
    return notes, [parameter.grad is not None for parameter in net.parameters()]


_EXCHANGE = ["wait until left", "left recorded", "arrived recorded", "wait until arrived"]
"""Of these only the last one waits: what the step before sent has left long ago."""


@pytest.mark.parametrize("spare", [False, True])
def test_a_step_waits_once_for_the_device_at_its_end(spare: bool) -> None:
    for notes, have in run_ranks(2, _steps, "samples", None, spare):
        assert notes == ["forward", *_EXCHANGE]
        assert have == [True, True, *[False] * 2 * spare]


def test_parts_of_a_batch_wait_for_nothing_in_between() -> None:
    for notes, _ in run_ranks(2, _steps, "samples", 4, False):
        assert notes == [*["forward"] * 3, *_EXCHANGE]


def test_tokens_are_read_when_the_device_has_a_forward_to_do() -> None:
    for notes, _ in run_ranks(2, _steps, "tokens", None, False):
        assert notes == ["forward", "tolist", *_EXCHANGE]
    for notes, _ in run_ranks(2, _steps, "tokens", 4, False):
        assert notes == ["forward", "tolist", *["forward"] * 2, *_EXCHANGE]


def _read_late(is_late: bool) -> list[Tensor]:
    """Gradients of parts, of which the last one has no unit: its mean loss is NaN."""
    loss_weights._waits = lambda units: is_late
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(3, 5).double())
    x = torch.randn(6, 3, dtype=torch.float64)
    labels = torch.tensor([1, 2, -100, 3, -100, -100]) if accelerator.is_main_process else torch.full((6,), 4)
    for size in (2, 6, 1):  # the first part of the last step alone is weighed late
        model.zero_grad()
        loss = accelerator.forward_backward(
            lambda batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"]),
            {"x": x.roll(size, 0), "labels": labels.roll(size, 0)},
            "tokens",
            micro_batch_size=size,
        )
    return [*(parameter.grad for parameter in model.parameters()), loss]


def test_a_part_without_units_has_no_say_however_late_that_is_known() -> None:
    for late, early in zip(run_ranks(2, _read_late, True), run_ranks(2, _read_late, False), strict=True):
        assert all(one.isfinite().all() and torch.equal(one, other) for one, other in zip(late, early, strict=True))


# -- words


class Alone(Collectives):
    """Sums of one rank."""

    def start_sum(self, tensor: Tensor) -> Any:
        return None


class Sum:
    """A sum on a device. Nobody asks it whether it is over, which takes the lock of a communicator."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def wait(self) -> None:
        self._notes.append("the stream waits for the sum")


def test_words_are_fetched_behind_the_sum_and_polled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    _pretend(notes, monkeypatch.setattr)
    place = torch.zeros(5)
    sent = gradient_buckets._Pinned(place, 2, _CUDA)
    sent.write([3.5, 1.0], [True, False, True])
    assert place.tolist() == [3.5, 1.0, 1.0, 0.0, 1.0]
    arrival = sent.arrival(Sum(notes))
    place.mul_(2)
    assert not arrival.is_completed()
    place.zero_()  # what comes after the copy is not read
    assert arrival.is_completed()
    assert sent.read() == [7.0, 2.0]
    assert sent.unused() == [False, True, False]
    assert notes == [
        *("wait until left", "left recorded"),
        *("the stream waits for the sum", "arrived recorded", "wait until arrived"),
    ]


def test_words_that_gloo_adds_up_are_fetched_when_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    _pretend(notes, monkeypatch.setattr)
    place = torch.zeros(3, dtype=torch.float64)
    sent = gradient_buckets._Pinned(place, 2, torch.device("cpu"))
    sent.write([1.0, 2.0], [True])
    work = Sum(notes)
    assert sent.arrival(work) is work
    place.mul_(3)
    assert sent.read() == [3.0, 6.0]
    assert notes == ["wait until left", "left recorded", "arrived recorded", "wait until arrived"]


def test_words_on_the_cpu_are_where_they_are_and_on_other_devices_they_are_copied() -> None:
    place = torch.zeros(3)
    assert type(make_words(place, 2, place.device)) is Words
    assert type(make_words(place.to("meta"), 2, place.device)) is gradient_buckets._Copied
    sent = gradient_buckets._Copied(place, 2)
    sent.write([1.0, 2.0], [False])
    place.add_(1)
    assert (sent.read(), sent.unused()) == ([2.0, 3.0], [False])


# -- where gradients are


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_begin_at_aligned_addresses_and_what_lies_between_stays_zero(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1)).to(dtype)
    gradients = Buckets([model], Alone(), 300, is_main=True)
    monkeyed = gradients._collectives
    monkeyed.finish_sums = lambda call, sums: None  # type: ignore[method-assign]
    gradients.open()
    gradients.begin()
    model(torch.ones(2, 7, dtype=dtype)).sum().backward()
    gradients.exchange(StepReport(weight=1))
    starts = [parameter.grad.data_ptr() for parameter in model.parameters()]  # type: ignore[union-attr]
    flats = {flat.untyped_storage().data_ptr(): flat for flat in gradients._flats}
    for parameter, start in zip(model.parameters(), starts, strict=True):
        assert parameter.grad is not None
        assert (start - parameter.grad.untyped_storage().data_ptr()) % 128 == 0
    sums = sum(float(flat.double().sum()) for flat in flats.values())
    expected = sum(float(parameter.grad.double().sum()) for parameter in model.parameters())  # type: ignore[union-attr]
    assert sums == pytest.approx(expected + 1 + 6)  # and the words: the weight, and the marks of six parameters
    assert len(flats) > 1


# -- means of parts


class _Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.waits.append(not (kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_the_mean_of_parts_copies_their_shares_without_waiting() -> None:
    losses = [(torch.zeros((), device="meta"), 3.0), (torch.zeros((), device="meta"), 1.0)]
    with _Copies() as copies:
        mean, weight = mean_of_parts(losses, torch.device("meta"))
    assert (mean.device.type, weight, copies.waits) == ("meta", 4.0, [False])
    assert mean_of_parts([(torch.tensor(1.0), 3.0), (torch.tensor(5.0), 1.0)], torch.device("cpu"))[0].item() == 2.0


def _weights_after(steps: int) -> Tensor:
    training = Training.start("AdamW")
    for number in range(steps):
        training.step(batch_of(12 + number, number, training.net.rank), micro_batch_size=5, weight=labelled)
    return training.weights()


def _pinned_weights_after(steps: int) -> Tensor:
    _pretend([])
    gradient_buckets.make_words = lambda place, count, sums_on: gradient_buckets._Pinned(place, count, sums_on)
    return _weights_after(steps)


def test_words_that_travel_change_no_number() -> None:
    for plain, pinned in zip(run_ranks(2, _weights_after, 3), run_ranks(2, _pinned_weights_after, 3), strict=True):
        assert torch.equal(plain, pinned)
