"""ProcessControl: the base of states and Accelerators. Runs in ranks, in scripts, and alone in a kernel.

It knows the rank of this process, runs actions in only some processes, and exchanges values of all ranks, over nested
containers; `gather_for_metrics` leaves repeated samples out. Subclasses give `world`, `device` and `collectives`.
`DistributedType` is the value that programs compare.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.errors import PeerFailed
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.collectives import Collectives, holds_only_tensors
from nbaccel.train.distributed.nested import children, map_children, share

__all__ = [
    "DistributedType",
    "LastRound",
    "ProcessControl",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ProcessControl(ABC):
    """Names that programs written for Accelerate find both on `PartialState` and on `Accelerator`.

    Runs in ranks, in scripts, and alone in a kernel. A decorated function reads the rank when it is called, not when it
    is decorated: a function that was decorated in the notebook's kernel behaves correctly in the ranks.
    """

    _is_triggered = False

    @property
    @abstractmethod
    def world(self) -> World:
        """This process's place in the run."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which this process computes."""

    @property
    @abstractmethod
    def collectives(self) -> Collectives:
        """The collectives of this process; forms the process group where there is none. Collective then."""

    # -- who

    @property
    def num_processes(self) -> int:
        return self.world.world_size

    @property
    def process_index(self) -> int:
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        return self.world.local_rank

    @property
    def is_main_process(self) -> bool:
        return self.world.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return self.world.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        return self.world.is_last_process

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.world.is_distributed

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of cooperation of the processes, for programs that compare it: ``DistributedType.MULTI_GPU``."""
        return DistributedType.of(self.world, self.device)

    # -- only some processes

    def on_main_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Return `function` as one that runs on rank 0 and returns None elsewhere; a decorator.

        Args:
            function: Any function.

        Example:
            >>> from nbaccel import PartialState
            >>> @PartialState().on_main_process
            ... def report() -> str:
            ...     return "done"
            >>> report()
            'done'
        """
        return _only_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Return `function` as one that runs on the first process of each node and returns None elsewhere; a decorator.

        Args:
            function: Any function.

        Example:
            >>> from nbaccel import PartialState
            >>> @PartialState().on_local_main_process
            ... def download() -> str:
            ...     return "once on each machine"
            >>> download()
            'once on each machine'
        """
        return _only_where(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Return `function` as one that runs on the last rank and returns None elsewhere; a decorator.

        Args:
            function: Any function.

        Example:
            >>> from nbaccel import PartialState
            >>> @PartialState().on_last_process
            ... def report() -> str:
            ...     return "by the last rank"
            >>> report()
            'by the last rank'
        """
        return _only_where(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Return a decorator for a function that runs on one rank and returns None elsewhere.

        A single process runs it whatever the number, as in Accelerate.

        Args:
            function: Left out where it is used as a decorator: ``@state.on_process(process_index=1)``.
            process_index: The rank.

        Example:
            >>> from nbaccel import PartialState
            >>> @PartialState().on_process(process_index=1)
            ... def report() -> str:
            ...     return "by rank 1, or by the only process"
            >>> report()
            'by rank 1, or by the only process'
        """
        index = _required("process_index", process_index)
        return _decorator(lambda: not self.use_distributed or self.process_index == index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Return a decorator for a function that runs on one process of each node and returns None elsewhere.

        A single process runs it whatever the number, as in Accelerate.

        Args:
            function: Left out where it is used as a decorator.
            local_process_index: The local number of that process.

        Example:
            >>> from nbaccel import PartialState
            >>> @PartialState().on_local_process(local_process_index=1)
            ... def report() -> str:
            ...     return "on each machine once"
            >>> report()
            'on each machine once'
        """
        index = _required("local_process_index", local_process_index)
        return _decorator(lambda: not self.use_distributed or self.local_process_index == index, function)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main process of each node.

        Args:
            *values: What to print.
            **options: Arguments of Python's `print`.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().print("loss", 0.5)
            loss 0.5
        """
        if self.is_local_main_process:
            print(*values, **options)

    # -- one after the other, or all at once

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this. Collective.

        Ranks with GPUs in one machine meet on the host and do not wait for pending work of their devices. To measure
        time, call `torch.cuda.synchronize()` as well.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().wait_for_everyone()
        """
        self.collectives.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a block that rank 0 runs first and the other ranks afterwards, for caches and downloads. Collective.

        Raises:
            PeerFailed: The block failed on rank 0. The other ranks raise it and do not enter the block.

        Example:
            >>> from nbaccel import PartialState
            >>> with PartialState().main_process_first():
            ...     data = list(range(3))  # a download; the other ranks find it in the cache
        """
        return self._first("main_process_first", self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return the block of `main_process_first`, with one first process per node. Collective, over all nodes.

        Example:
            >>> from nbaccel import PartialState
            >>> with PartialState().local_main_process_first():
            ...     data = list(range(3))  # a download; the other ranks of this machine find it in the cache
        """
        return self._first("local_main_process_first", self.is_local_main_process)

    @contextmanager
    def _first(self, call: str, is_first: bool) -> Iterator[None]:
        # The first ranks end the others' wait, also when they fail.
        if not is_first:
            said = self.collectives.announce(call)
            failed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
            if failed:
                raise PeerFailed(f"rank {self.process_index} did not enter its {call} block. It failed on {failed}")
            yield
            return
        try:
            yield
        except BaseException as error:
            self.collectives.announce(call, f"{type(error).__name__}: {error}")
            raise
        self.collectives.announce(call)

    def set_trigger(self) -> None:
        """Set a flag on this rank, which all ranks see at the next `check_trigger`; for early stopping.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> loss = float("inf")
            >>> if loss > 1e3:
            ...     accelerator.set_trigger()  # on this rank
            >>> accelerator.check_trigger()  # on all
            True
        """
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank has set its flag since the last check, and clear it. Collective, in every step or
        none.

        Example:
            >>> from nbaccel import Accelerator
            >>> accelerator = Accelerator()
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        mine, self._is_triggered = self._is_triggered, False
        return self.collectives.any(mine, "check_trigger")

    # -- a part for every rank

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's share of `inputs`.

        Where they do not divide evenly, the first ranks get one more.

        Args:
            inputs: A list, tuple, range, tensor, array, data frame or dataset, the same on every rank; or a mapping of
                those with equal lengths, of which each rank gets a new mapping. Other iterables are read into a list.
            apply_padding: Repeat the last element so that every rank has equally many.

        Raises:
            TypeError: `inputs` cannot be cut into parts: a string or a set, for example.
            ValueError: The values of a mapping have different lengths.

        Example:
            >>> from nbaccel import PartialState
            >>> with PartialState().split_between_processes(["a", "b"]) as mine:
            ...     mine
            ['a', 'b']
        """
        world = self.world
        yield share(inputs, world.rank, world.world_size, apply_padding) if world.is_distributed else inputs

    # -- values of all ranks

    def gather(self, tensor: Any) -> Any:
        """Gather every tensor in `tensor` from all ranks. Collective.

        Args:
            tensor: Tensors of equal shapes on all ranks, in any nesting; None stays None. A value without any tensor,
                such as a list of generated texts, is gathered by pickle.

        Returns:
            The same structure on every rank, with the tensors of all ranks joined along the first dimension; 0-d
            tensors become one entry per rank. Without tensors: lists joined, mappings joined by key, other values as a
            list by rank.

        Raises:
            CollectiveMismatch: The ranks called it with different structures, dtypes or shapes.
            TypeError: Tensors are mixed with something else, or an object cannot be pickled on some rank.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().gather({"loss": torch.ones(2)})
            {'loss': tensor([1., 1.])}
        """
        return self.collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values from all ranks, each sample once: without those that fill up the last round of a loader.
        Collective.

        Objects other than tensors are gathered by pickle.

        Args:
            input_data: Tensors with one row, or lists with one entry, for each sample of this rank's batch, in any
                nesting. One number per rank, such as a mean loss, is gathered from every rank.
            use_gather_object: Use pickle for tensors too; their shapes may then differ between samples.

        Returns:
            The same structure on every rank, with the rows of all ranks joined along the first dimension.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().gather_for_metrics(["cat", "dog"])
            ['cat', 'dog']
        """
        last = self._last_round()
        if self._counts_nothing():
            input_data = _no_samples(input_data)
        if use_gather_object or not holds_only_tensors(input_data):
            return last.of_objects(self.collectives.gather_objects(input_data), input_data)
        gather = self.collectives.gather_uneven if last.may_be_uneven else self.collectives.gather
        return last.of_tensors(gather(input_data), input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce every tensor in `tensor` over the ranks; `tensor` itself is not changed. Collective.

        Args:
            tensor: Tensors of equal shapes on all ranks, in any nesting. Booleans are counted.
            reduction: "sum", "mean", "max" or "min".
            scale: A factor of the result.

        Returns:
            The same structure on every rank, with the reduced tensors.

        Raises:
            CollectiveMismatch: The ranks called it with different structures, dtypes or shapes.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().reduce(torch.tensor([2.0, 4.0]), "mean", scale=0.5)
            tensor([1., 2.])
        """
        return self.collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad every tensor in `tensor` along a dimension to the longest of all ranks. Collective.

        Args:
            tensor: Tensors in any nesting. One without the dimension `dim` is not changed.
            dim: The dimension.
            pad_index: The value of the padding.
            pad_first: Put the padding at the front instead of the end.

        Returns:
            The same structure, with the padded tensors.

        Example:
            >>> from nbaccel import Accelerator
            >>> Accelerator().pad_across_processes(torch.ones(2)).shape
            torch.Size([2])
        """
        return self.collectives.pad(tensor, dim, pad_index, pad_first)

    def _last_round(self) -> LastRound:
        """Return what is known of the samples that all ranks now hold. A state has no loader; an Accelerator has."""
        return LastRound()

    def _counts_nothing(self) -> bool:
        """Return whether this rank's samples were gathered before, and are only there to match the others' calls."""
        return False


def _only_where(is_here: Callable[[], bool], function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    @wraps(function)
    def only_here(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        return function(*args, **kwargs) if is_here() else None

    return only_here


def _decorator(is_here: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
    if function is None:
        return lambda decorated: _only_where(is_here, decorated)
    return _only_where(is_here, function)


def _required(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"which process? Give the decorator its number: {name}=0")
    return value


@frozen
class LastRound:
    """Samples that the ranks hold in the round that they are in.

    Args:
        may_be_uneven: They may hold different numbers of them.
        held, real: Those of all ranks together, where the round was filled up: `held` of which the first `real` are no
            repetition. None where that does not matter, or is not known.
        ranks: How many there are.
    """

    may_be_uneven: bool = False
    held: int | None = None
    real: int | None = None
    ranks: int = 1

    def of_tensors(self, joined: Any, own: Any) -> Any:
        """Return the tensors of all ranks without repeated samples.

        Args:
            own: What this rank gave for them. A tensor without dimensions stands for the rank, not for a sample.
        """
        if self.real is None or own is None:
            return joined
        if isinstance(own, torch.Tensor):
            return joined[: self._first_of(len(joined))] if own.ndim else joined
        ours = iter([child for _, child in children(own)])
        return map_children(lambda child: self.of_tensors(child, next(ours)), joined)

    def of_objects(self, joined: Any, own: Any) -> Any:
        """Return the objects of all ranks without repeated samples; a list of a rank has an entry for each of its own.

        Args:
            own: What this rank gave for them.
        """
        if self.real is None:
            return joined
        if (isinstance(own, Mapping) or hasattr(own, "_fields")) and type(joined) in (dict, type(own)):
            ours, names = dict(children(own)), iter([name for name, _ in children(joined)])
            return map_children(lambda child: self.of_objects(child, ours[next(names)]), joined)
        has_entries = isinstance(own, (list, tuple)) or (isinstance(own, torch.Tensor) and own.ndim)
        return joined[: self._first_of(len(joined))] if has_entries else joined

    def _first_of(self, entries: int) -> int:
        """Return how many of `entries` that all ranks have given are no repetition: they come first."""
        assert self.real is not None
        if entries == self.ranks != self.held:
            return entries
        if self.held is None or entries == self.held:
            return self.real
        if entries:
            warn_user(
                f"gather_for_metrics: the {self.ranks} ranks gave {entries} entries in a loader's last round, where "
                f"they hold {self.held} samples, and the last {self.held - self.real} of these are repetitions. It is "
                "not known which entries belong to them, so all are returned. Gather one entry for each sample."
            )
        return entries


def _no_samples(value: Any) -> Any:
    """Return `value` without its samples; a number of the rank stays."""
    if isinstance(value, Mapping):
        return map_children(_no_samples, value)
    return value[:0] if hasattr(value, "__getitem__") and getattr(value, "ndim", None) != 0 else value


class DistributedType(StrEnum):
    """Kinds of cooperation between the processes of a run; Accelerate's names, so that comparisons keep their meaning.

    nbaccel uses NO (one process), MULTI_CPU, MULTI_GPU, MULTI_XPU (replicas on devices of that kind), FSDP, DEEPSPEED
    and XLA. The other names exist because programs compare with them; no run has them.

    Example:
        >>> DistributedType.NO == "NO"
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def of(cls, world: World, device: torch.device) -> DistributedType:
        """Return the type of a run with replicas on devices of one kind, unless its strategy has its own type.

        Args:
            world: The position of this process.
            device: Its device.
        """
        if device.type == "xla":
            return cls.XLA
        if not world.is_distributed:
            return cls.NO
        return {"cuda": cls.MULTI_GPU, "xpu": cls.MULTI_XPU}.get(device.type, cls.MULTI_CPU)
