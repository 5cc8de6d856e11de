"""Gradients that are exchanged with peers, in a sequence that is the same in every attempt. Run in ranks.

Flat tensors, allocated once; ``parameter.grad`` is a view into them, at an aligned address. Every attempt of every rank
sums bucket 0, 1, ... B-1 in this order, whatever happened locally: a rank that failed sends what it has. The last
bucket also carries the rank's `StepReport`, which parameters took part, and rank 0's running statistics, so nothing
else is exchanged (`Words`). Finishing the sequence allocates nothing on the device. The engine decides which rank
repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from nbaccel.errors import CannotSplit
from nbaccel.features.micro_batches.lent_gradients import Gradients, StepReport, copies_of
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.step.kwargs_handlers import DistributedDataParallelKwargs
from nbaccel.train.strategies.norm_statistics import running_statistics
from nbaccel.train.strategies.replicated import Replica
from nbaccel.train.strategies.single import INSTEAD, is_parallel, is_sharded, without_compile

__all__ = [
    "Buckets",
    "Words",
    "lend_of_replicas",
    "lendable",
    "make_words",
]

_WORDS = len(StepReport().numbers)

_ALIGNMENT = 128
"""Bytes. Vectorised kernels need addresses that 16 bytes divide, and are slower over a whole list of tensors
if one of them has none; 128 are a line of a GPU's cache."""

_EXACT = (torch.float32, torch.float64)
"""Dtypes in which counts of tokens are still exact when they are added."""


class Buckets(Gradients):
    """The gradients of `models`, which are equal on all ranks.

    Args:
        cap_bytes: Size of one bucket, unless a single parameter is larger.
        sends_statistics: Copy rank 0's running statistics of normalisation layers to all ranks, as DDP does.
        on_return: Called by `give_back`, when the gradients are returned to their owner.
    """

    has_peers = True

    def __init__(
        self,
        models: Sequence[Module],
        collectives: Collectives,
        cap_bytes: int,
        is_main: bool,
        sends_statistics: bool = True,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(models)
        self._collectives = collectives
        self._is_main = is_main
        self._on_return = on_return
        self._statistics = list(running_statistics(models)) if sends_statistics else []
        self._lay_out(cap_bytes)
        self._used = [False] * len(self.parameters)
        self._had: list[bool] = []
        self._aside_flats: list[Tensor] = []
        self._unused: list[bool] = []
        self._overlaps = False
        self._launched = 0
        self._works: list[Any] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._completed, index))
            for index, parameter in enumerate(self.parameters)
        ]

    def _lay_out(self, cap_bytes: int) -> None:
        """Divide the parameters among buckets, the last layers' first, as a backward completes them."""
        groups = _grouped(self.parameters, cap_bytes)
        extra = _WORDS + len(self.parameters) + sum(buffer.numel() for buffer in self._statistics)
        last = self.parameters[groups[-1][0]]
        shares = [0] * len(groups)
        if last.dtype in _EXACT:
            shares[-1] = extra
        self._flats: list[Tensor] = []
        self._views: list[Tensor] = [torch.empty(0, device="cpu")] * len(self.parameters)
        self._bucket_of = [0] * len(self.parameters)
        for bucket, (indices, share) in enumerate(zip(groups, shares, strict=True)):
            first = self.parameters[indices[0]]
            size = sum(_room(self.parameters[index]) for index in indices)
            flat = torch.zeros(size + share, dtype=first.dtype, device=first.device)
            offset = 0
            for index in indices:
                self._views[index] = _view(flat, offset, self.parameters[index])
                self._bucket_of[index] = bucket
                offset += _room(self.parameters[index])
            self._flats.append(flat)
        self._sizes = [len(indices) for indices in groups]
        if not shares[-1]:
            self._flats.append(torch.zeros(extra, dtype=torch.float32, device=last.device))
            self._sizes.append(0)
        self._tail = self._flats[-1][-extra:]
        words, sent = self._tail.tensor_split([_WORDS + len(self.parameters)])
        self._words = make_words(words, _WORDS, self._collectives.device)
        lengths = [buffer.numel() for buffer in self._statistics]
        self._sent_statistics = [
            part.view_as(buffer) for part, buffer in zip(sent.split(lengths), self._statistics, strict=True)
        ]

    # -- a window

    def open(self) -> None:
        self._had = [parameter.grad is not None for parameter in self.parameters]
        self._aside_flats = self._lay_aside() if any(self._had) else []
        self.is_open = True
        self.restore(None)

    def _lay_aside(self) -> list[Tensor]:
        """Save gradients of earlier steps that were not zeroed; they may be buckets of the last backward, or zeroed."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad is not view:
                    view.copy_(parameter.grad)
            self._tail.zero_()
            if not bool(torch.stack([flat.any() for flat in self._flats]).any()):
                return []
            return [flat.clone() for flat in self._flats]

    def keep(self) -> Any:
        return copies_of(self._flats), list(self._used)

    def restore(self, kept: Any) -> None:
        if kept is None:
            torch._foreach_zero_(self._flats)
            self._used = [False] * len(self.parameters)
        else:
            copies, used = kept
            for flat, copy in zip(self._flats, copies, strict=True):
                flat.copy_(copy)
            self._used = list(used)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def close(self, factor: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(self._flats, factor)
        if self._aside_flats:
            torch._foreach_add_(self._flats, self._aside_flats)
        for index, is_unused in enumerate(self._unused or [not used for used in self._used]):
            if is_unused and not self._had[index]:
                self.parameters[index].grad = None  # as plain PyTorch: the optimizer skips it
        self._aside_flats = []
        self._unused = []
        self.is_open = False

    def discard(self) -> None:
        if not self.is_open:
            return
        self._overlaps = False
        torch._foreach_zero_(self._flats)
        if self._aside_flats:
            torch._foreach_add_(self._flats, self._aside_flats)
        for parameter, had in zip(self.parameters, self._had, strict=True):
            if not (had and self._aside_flats):
                parameter.grad = None
        self._aside_flats = []
        self._unused = []
        self.is_open = False

    # -- an attempt

    def begin(self) -> None:
        self._overlaps = self.has_launched = self.is_torn = False
        self._launched = 0
        self._works = []
        self._missing = list(self._sizes)

    def overlap(self) -> None:
        self._overlaps = True

    def _completed(self, index: int, parameter: Tensor) -> None:
        """Note that autograd has added a gradient to that of a parameter."""
        view = self._views[index]
        if parameter.grad is not view and self.is_busy:  # added out of place: a sparse gradient, for one
            view.copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = view
        self._used[index] = True
        if not self._overlaps:
            return
        bucket = self._bucket_of[index]
        if bucket < self._launched:  # completed twice in one backward, by a block that is used again
            self.is_torn = True
            return
        self._missing[bucket] -= 1
        while self._launched < len(self._flats) - 1 and self._missing[self._launched] <= 0:
            self._launch()

    def _launch(self) -> None:
        self.has_launched = True
        self._works.append(self._collectives.start_sum(self._flats[self._launched]))
        self._launched += 1

    def exchange(self, report: StepReport) -> StepReport:
        self._overlaps = False
        self._words.write(report.numbers, self._used)
        self._fill_statistics()
        while self._launched < len(self._flats):
            self._launch()
        *others, last = self._works
        self._collectives.finish_sums("forward_backward", [*others, self._words.arrival(last)])
        self._works = []
        said = StepReport(*self._words.read())
        self._unused = [False] * len(self._used) if all(self._used) else self._words.unused()
        if self._statistics and not (said.poisoned or said.unfit or said.failed):
            torch._foreach_copy_(self._statistics, self._sent_statistics)
        return said

    def _fill_statistics(self) -> None:
        if self._statistics:
            if self._is_main:
                torch._foreach_copy_(self._sent_statistics, self._statistics)
            else:
                torch._foreach_zero_(self._sent_statistics)

    def release(self) -> None:
        if self.is_released:
            return
        super().release()
        for hook in self._hooks:
            hook.remove()
        self._flats, self._views, self._aside_flats, self._works = [], [], [], []
        del self._tail, self._words, self._sent_statistics

    def give_back(self) -> None:
        super().give_back()
        self._on_return()

    def staying(self) -> AbstractContextManager[None]:
        """Return a block in which forwards of the program's own do not take the gradients back."""
        return _StayLent(self)

    def alone(self) -> AbstractContextManager[None]:
        """Return a block in which gradients are put into the buckets, as in training, and not exchanged."""
        return _AloneWithBuckets(self)


class _StayLent:
    """Lets forwards with gradients be as those of `forward_backward`, so that lent gradients stay lent."""

    __slots__ = ("_before", "_gradients")

    def __init__(self, gradients: Buckets) -> None:
        self._gradients = gradients

    def __enter__(self) -> None:
        self._before = self._gradients.is_busy
        self._gradients.is_busy = True

    def __exit__(self, *exception: object) -> None:
        self._gradients.is_busy = self._before


class _AloneWithBuckets:
    """Puts gradients into the buckets, as in training, and does not exchange them."""

    __slots__ = ("_gradients", "_opened")

    def __init__(self, gradients: Buckets) -> None:
        self._gradients = gradients

    def __enter__(self) -> None:
        self._opened = not self._gradients.is_open
        if self._opened:
            self._gradients.open()
        self._gradients.is_busy = True

    def __exit__(self, *exception: object) -> None:
        self._gradients.is_busy = False
        if self._opened:
            self._gradients.discard()


def _grouped(parameters: Sequence[Parameter], cap_bytes: int) -> list[list[int]]:
    """Return the indices of each bucket's parameters: one dtype and device, at most `cap_bytes` unless a single one."""
    open_groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    done: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        kind = parameter.dtype, parameter.device
        size_bytes = _room(parameter) * parameter.element_size()
        if kind in open_groups and sizes[kind] + size_bytes > cap_bytes:
            done.append(open_groups.pop(kind))
        if kind not in open_groups:
            open_groups[kind], sizes[kind] = [], 0
        open_groups[kind].append(index)
        sizes[kind] += size_bytes
    return done + sorted(open_groups.values(), key=lambda indices: parameters[indices[0]].dtype in _EXACT)


def _room(parameter: Tensor) -> int:
    """Return the number of elements from one gradient to the next; unused ones stay zero."""
    step = _ALIGNMENT // parameter.element_size()
    return -(-parameter.numel() // step) * step


def _view(flat: Tensor, offset: int, parameter: Parameter) -> Tensor:
    """Return the part of `flat` for one gradient, in the memory layout of its parameter."""
    part = flat[offset : offset + parameter.numel()]
    return part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


_M = TypeVar("_M", bound=Module)


def lend_of_replicas(
    models: Sequence[Module],
    collectives: Collectives,
    options: DistributedDataParallelKwargs,
    is_main: bool,
    compress: Callable[[Replica], None],
) -> Buckets:
    """Return the gradients of DDP's models, which has them again as soon as the program runs a forward of its own.

    Collective.

    Args:
        options: Those of DDP.
        is_main: This is rank 0.
        compress: Registers the hook by which DDP sends gradients, after it has them again.

    Raises:
        CannotSplit: A model exchanges something in its forward, or its gradients are not ours to lend.
    """
    replicas = lendable(models, Replica)
    collectives.agree(f"forward_backward with {', '.join(type(replica.module).__name__ for replica in replicas)}")

    def take_back() -> None:
        for replica in replicas:
            replica.build_buckets()
            compress(replica)

    for replica in replicas:
        replica.free_buckets()  # before ours are made: the two never exist together
    gradients = Buckets(
        [replica.module for replica in replicas],
        collectives,
        cap_bytes=options.bucket_cap_mb << 20,
        is_main=is_main,
        sends_statistics=options.broadcast_buffers,
        on_return=take_back,
    )
    for replica in replicas:
        replica.lent_to = gradients
    return gradients


def lendable(models: Sequence[Module], kind: type[_M]) -> list[_M]:
    """Return those of `models` that exchange gradients, without ``torch.compile``; all are of the class `kind`.

    A rank may repeat a forward alone only if nothing in it waits for peers.

    Raises:
        CannotSplit: One of them cannot run in micro-batches; gives the reason, and an alternative.
    """
    found: list[_M] = []
    for model in map(without_compile, models):
        for name, module in model.named_modules():
            if isinstance(module, SyncBatchNorm):
                raise CannotSplit(
                    f"forward_backward cannot lead {_name(model)}: {name.removeprefix('module.')} is a SyncBatchNorm, "
                    "which exchanges statistics in every forward. A rank that ran out of memory would repeat its "
                    f"forward alone, and wait for peers that do not. BatchNorm and GroupNorm work. {INSTEAD}"
                )
            if is_sharded(module):
                raise CannotSplit(
                    f"forward_backward cannot lead {_name(model)}: it is sharded (FSDP), so every forward gathers its "
                    "parameters from all ranks. A rank that ran out of memory would repeat its forward alone, and "
                    f"wait for peers that do not. {INSTEAD}"
                )
        devices = sorted({str(parameter.device) for parameter in model.parameters() if parameter.requires_grad})
        if len(devices) > 1:
            raise CannotSplit(
                f"forward_backward cannot lead {_name(model)}: what it trains is on {' and '.join(devices)}, and "
                f"gradients of one device are exchanged. {INSTEAD}"
            )
        if isinstance(model, kind):
            found.append(model)
        elif is_parallel(model):
            raise CannotSplit(
                f"forward_backward exchanges gradients itself, and {_name(model)} came to prepare inside a "
                f"DistributedDataParallel of the program's own: hand prepare the bare model. {INSTEAD}"
            )
    return found


def _name(model: Module) -> str:
    return type(model.module if isinstance(model, DistributedDataParallel) else model).__name__


class Words:
    """A report of `count` numbers, followed by one mark per parameter, in `place`: the end of the summed tensor.

    They are the few numbers that ranks sum beside their gradients. The host writes them before a sum and reads them
    after it. On the CPU they are accessed in place. On CUDA they are copied through pinned memory, in the stream of the
    computation: writing waits for nothing, and one event says that they can be read. Memory for that is allocated once,
    since a rank without free memory has to write its words too.

    This class is for a place that the host can write and read.
    """

    def __init__(self, place: Tensor, count: int) -> None:
        self._place = place
        self._written = self._lay_out()
        self._received = self._written
        self._count = count

    def _lay_out(self) -> Tensor:
        return self._place

    def write(self, report: Sequence[float], used: Sequence[bool]) -> None:
        """Write this rank's words.

        Args:
            used: The parameters that took part.
        """
        numbers, marks = self._written[: self._count], self._written[self._count :]
        numbers.copy_(torch.tensor(report, dtype=torch.float64, device="cpu"))
        if all(used):
            marks.fill_(1.0)
        else:
            marks.copy_(torch.tensor(used, dtype=torch.float32, device="cpu"))

    def arrival(self, last_sum: Any) -> Any:
        """Return the work to wait for instead of `last_sum`, the work that sums the words."""
        return last_sum

    def read(self) -> list[float]:
        """Return the report of all ranks; called after the sums are over."""
        said: list[float] = self._received[: self._count].tolist()
        return said

    def unused(self) -> list[bool]:
        """Return which parameters took part on no rank, as of the last `read`."""
        return [mark == 0 for mark in self._received[self._count :].tolist()]


def make_words(place: Tensor, count: int, sums_on: torch.device) -> Words:
    """Return the words in `place`.

    Args:
        sums_on: The device on which the process group sums.
    """
    if place.is_cpu:
        return Words(place, count)
    return _Pinned(place, count, sums_on) if place.device.type == "cuda" else _Copied(place, count)


class _Copied(Words):
    """Words on a device for which no copy without waiting is known."""

    def _lay_out(self) -> Tensor:
        return torch.zeros(self._place.shape, dtype=self._place.dtype, device="cpu")

    def write(self, report: Sequence[float], used: Sequence[bool]) -> None:
        super().write(report, used)
        self._place.copy_(self._written)

    def read(self) -> list[float]:
        self._received.copy_(self._place)
        return super().read()


class _Pinned(Words):
    """Words on CUDA."""

    def __init__(self, place: Tensor, count: int, sums_on: torch.device) -> None:
        super().__init__(place, count)
        self._received = self._lay_out()
        self._left, self._arrived = torch.cuda.Event(), torch.cuda.Event()
        self._follows_sums = sums_on.type == "cuda"

    def _lay_out(self) -> Tensor:
        return torch.zeros(self._place.shape, dtype=self._place.dtype, device="cpu", pin_memory=True)

    def write(self, report: Sequence[float], used: Sequence[bool]) -> None:
        self._left.synchronize()  # of the step before; not done only if that one was aborted
        super().write(report, used)
        self._place.copy_(self._written, non_blocking=True)
        self._left.record(torch.cuda.current_stream(self._place.device))

    def arrival(self, last_sum: Any) -> Any:
        return _Arrival(last_sum, self) if self._follows_sums else last_sum

    def fetch(self) -> torch.cuda.Event:
        """Begin to copy the words to the host; return the event that marks the end of the copy."""
        self._received.copy_(self._place, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(self._place.device))
        return self._arrived

    def read(self) -> list[float]:
        if not self._follows_sums:
            self.fetch()
        self._arrived.synchronize()
        return super().read()


class _Arrival:
    """A sum on the device and the copy of its words to the host, as one work to wait for.

    The device waits for the sum, and copies; so the host, which polls, wakes up once and not twice.
    """

    def __init__(self, work: Any, words: _Pinned) -> None:
        self._work = work
        self._words = words
        self._event: torch.cuda.Event | None = None

    def is_completed(self) -> bool:
        if self._event is None:
            self._work.wait()  # lets the stream wait, not the host
            self._event = self._words.fetch()
        # The event is behind the sum in the stream, and the work itself must not be asked during an abort.
        return bool(self._event.query())

    def wait(self) -> None:
        self._work.wait()
