"""Random numbers of one rank, some common to all ranks and some its own, and its own device. Runs in ranks.

torch's generator has two streams. The common one gives the order of samples, as in one process. While the program
works on this rank's part of a batch, the rank's own stream is active: dropout differs between ranks, and the order of
samples stays the same in all, however much they draw.
`use_own_device` is for programs that name "cuda" without a number, `idle_gpu` for those that name no device.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from nbaccel.base.world import World

__all__ = [
    "Seeds",
    "Streams",
    "idle_gpu",
    "mixed",
    "use_own_device",
]

_MASK = 2**32 - 1
_WATCHED = 64
"""First parts of a loop after which to check whether Python or NumPy have drawn, at 0.1 ms each. Some data sets draw
for some samples only, so one part is not enough."""

_WATCHED_AGAIN = 2
"""The same at the begin of each pass: a data set may draw from its second epoch on."""

_NUMBERS = ("_seed", "_base", "_count", "_is_apart", "_has_seeded_cuda")
_GENERATORS = ("_common", "_programs")
"""Attributes of `Streams` that make its state: numbers, and states of a generator or None."""


class Streams:
    """The random streams of one rank: torch's on the CPU, and Python's and NumPy's while samples are fetched.

    Programs decide by Python's and NumPy's numbers, so these stay common; but a data set that draws from them draws as
    often as its part has samples, and the ranks' numbers would differ afterwards.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: torch.Tensor | None = None  # its state while the own one is active
        self._is_apart = False
        self.begin()

    def begin(self, order_seed: int | None = None) -> None:
        """Begin a task: the active stream is the common one.

        Args:
            order_seed: Given where ranks are seeded differently: the seed of the order of samples. Then the rank's own
                stream is the active one.
        """
        self.common()
        self._seed = self._base = self._count = 0
        self._kept: tuple[Any, ...] | None = None  # Python's and NumPy's states while samples are fetched
        self._watched: Any = None
        self._drawing: set[Any] = set()  # loaders whose data sets draw from these
        self._has_seeded_cuda = False
        self._is_apart = order_seed is not None
        self._programs: torch.Tensor | None = None  # the state of the rank's own numbers, where it was seeded apart
        if order_seed is not None:
            self._common = torch.Generator().manual_seed(order_seed).get_state()
            self._seed = torch.default_generator.initial_seed()

    def state(self) -> dict[str, Any]:
        """Return what the generators do not hold themselves, as it is between two batches."""
        numbers = {name: getattr(self, name) for name in _NUMBERS} | {"drawing": self._drawing}
        return numbers | {name: None if (each := getattr(self, name)) is None else each.numpy().tobytes()
                          for name in _GENERATORS}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with a state of `state`, after the generators themselves were restored."""
        self._drawing |= state["drawing"]
        for name in _NUMBERS:
            setattr(self, name, state[name])
        for name in _GENERATORS:
            held = state[name]
            setattr(self, name, None if held is None else torch.frombuffer(bytearray(held), dtype=torch.uint8))

    def end(self) -> None:
        self.fetched()
        self.common()
        if self._is_apart and self._programs is not None:
            torch.default_generator.set_state(self._programs)

    def common(self) -> None:
        """Activate the common stream, for draws that all ranks make."""
        if self._common is None:
            return
        generator = torch.default_generator
        seed = generator.initial_seed()
        if self._is_apart and self._programs is None:
            self._programs = generator.get_state()
        if seed == self._seed:
            generator.set_state(self._common)
        else:
            generator.manual_seed(seed)  # by the program, in all ranks; numbers drawn since then may differ
        self._common = None

    def own(self) -> None:
        """Activate this rank's own stream."""
        if self._common is not None:
            return
        generator = torch.default_generator
        base = generator.initial_seed()
        self._count = self._count + 1 if base == self._base else 1
        self._base, self._seed = base, mixed(base, self._rank, self._count)
        self._common = generator.get_state()
        generator.manual_seed(self._seed)
        if not self._has_seeded_cuda and torch.cuda.is_initialized():
            self._has_seeded_cuda = True
            torch.cuda.manual_seed(self._seed)

    def noise(self) -> int:
        """Return a digest of the states of Python's and NumPy's generators."""
        python, numpy = _states()
        found = zlib.crc32(repr(python[1][-1]).encode(), hash(python[1][:-1]) & _MASK)
        return found if numpy is None else zlib.crc32(numpy[1].tobytes(), found ^ numpy[2])

    def share_noise(self, gather: Callable[[Any], list[Any]]) -> None:
        """Continue with rank 0's Python and NumPy generators, after a loop has drawn for samples. Collective.

        Args:
            gather: Returns to all ranks the joined entries of their lists.
        """
        _set_states(gather([_states()])[0])

    def fetch_apart(self, loader: Any, parts: int, in_pass: int) -> None:
        """Prepare to fetch samples of `loader` in this rank alone.

        Args:
            parts: Of the loop that came before.
            in_pass: Of these, those of this pass.
        """
        if loader in self._drawing:
            self._kept = _states()
            random.seed(self._seed)
            if self._kept[1] is not None:
                sys.modules["numpy"].random.seed(self._seed % 2**32)
        elif parts < _WATCHED or in_pass < _WATCHED_AGAIN:
            self._kept, self._watched = _states(), loader

    def fetched(self) -> None:
        """Restore Python's and NumPy's generators after the samples were fetched."""
        if self._kept is None:
            return
        if self._watched is None or not _are_equal(self._kept, _states()):
            _set_states(self._kept)
            if self._watched is not None:
                self._drawing.add(self._watched)
        self._kept = self._watched = None


class Seeds(NamedTuple):
    """The seeds of a process's generators at one time: torch's, and what only a seed changes of Python's and NumPy's.

    Args:
        numpy: None where it was not imported, or another generator is its default.
    """

    torch: int
    python: tuple[int, ...]
    numpy: bytes | None

    @classmethod
    def now(cls) -> Seeds:
        states = _states()
        python = random.Random()
        python.setstate(states[0])
        python.getrandbits(32)  # the first number after a seed changes the words that later ones are taken of
        numpy = None
        if states[1] is not None and states[1][0] == "MT19937":
            copy = sys.modules["numpy"].random.RandomState()
            copy.set_state(states[1])
            copy.random_sample()
            numpy = copy.get_state()[1].tobytes()
        return cls(torch.default_generator.initial_seed(), python.getstate()[1][:-1], numpy)

    def draw_apart(self, rank: int) -> None:
        """Give a rank other random numbers than rank 0, which continues; not where the program has seeded since.

        A program that seeds all ranks alike may count on it. After 600 numbers of Python's or NumPy's it cannot be told
        from one that has; it is left alone, too.
        """
        now, state = Seeds.now(), torch.default_generator.get_state()
        seed = mixed(zlib.crc32(state.numpy().tobytes()), rank)
        if not rank:
            return
        if now.torch == self.torch:
            torch.manual_seed(seed)
        if now.python == self.python:
            random.seed(seed)
        if now.numpy is not None and now.numpy == self.numpy:
            sys.modules["numpy"].random.seed(seed % 2**32)


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    if states[1] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states[1])


def _are_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] == other[0] and (one[1] is None or one[1][2:] == other[1][2:])  # by NumPy's position


def mixed(*numbers: int) -> int:
    """Return a seed that differs for other numbers; the hash of integers is the same in all processes."""
    return hash(numbers) & (2**62 - 1)


def use_own_device(world: World) -> None:
    """Make this rank's device torch's current one as soon as the program uses CUDA; nothing is touched before.

    A device that is the only visible one is the current one anyway: a launcher may hide the others from a rank. A torch
    that was built without CUDA is asked for nothing: it notes the sources of the whole stack beside each such request.
    """
    if not torch.backends.cuda.is_built():
        return

    def choose() -> None:
        if world.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(world.device_number(torch.cuda.device_count()))

    torch.cuda._lazy_call(choose)


def idle_gpu(trained_on: Iterable[torch.device]) -> str:
    """Return a line on the GPU that this rank could use while its loop trains on the CPU; empty if it uses one.

    A loop that prepares nothing computes where its program has put the model.

    Args:
        trained_on: The devices of what is trained.
    """
    if any(device.type != "cpu" for device in trained_on):
        return ""
    if not (torch.backends.cuda.is_built() and torch.cuda.is_available()):
        return ""
    return (
        "the model is on the CPU, and the GPU idle: model.to('cuda') above the loop, inputs.to('cuda') and "
        "targets.to('cuda') in it; --cpu if that is meant"
    )
