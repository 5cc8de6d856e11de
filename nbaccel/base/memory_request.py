"""MemoryRequest: the numbers of a refused request for memory, and whether smaller batches can help.

`MemoryRequest.of` runs where the error is, before anything is freed; the numbers are sent to the kernel. The rest is
pure.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

from nbaccel.base.failures import Recovery, asked_bytes, in_bytes, is_of_host, recovery_of
from nbaccel.base.memory_limit import MemoryLimit, fullness, host_limit, unused_heap
from nbaccel.base.values import attributes_of, frozen

__all__ = ["WHAT_HELPS", "MemoryRequest", "total_and_free"]

WHAT_HELPS = (
    "a smaller model, fp16 or bf16, an 8-bit optimizer, gradient checkpointing, parameters or states that are "
    "offloaded or sharded (strategy fsdp), or a device with more memory; accelerator.estimate(model, optimizer) says "
    "what would fit"
)
"""Advice for the case that smaller batches do not help."""

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_TOTAL_AND_FREE = re.compile(rf"(?:total capacity of|allows) {_SIZE},? of which {_SIZE} (?:is|are) free")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_ALLOWED = re.compile(rf"{_SIZE} allowed")

_NOISE = 0.1
"""Fraction of the request by which one sample must exceed the limit: allocators keep some freed memory."""

_MOST_VALUES = 1000
"""Number of values of one frame or object that are read."""


@frozen
class MemoryRequest:
    """The requested and the available memory.

    Args:
        asked_bytes: 0 if the error does not say.
        used_bytes: In use without the request.
        limit_bytes: 0 if unknown.
        fullness: See `nbaccel.base.memory_limit.fullness`.
        parameters_bytes, gradients_bytes, states_bytes: Those of the models and optimizers that the frames of the error
            mention.
    """

    asked_bytes: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    fullness: float | None = None
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    states_bytes: int = 0

    @classmethod
    def of(cls, error: BaseException) -> MemoryRequest | None:
        """Return the numbers of `error`; None if it is not about memory, or they are unknown."""
        try:
            if recovery_of(error) not in (Recovery.RETRY, Recovery.RETRY_IF_NEARLY_FULL):
                return None
            text = str(error)
            room = _stated(text) or (_live_on_host() if is_of_host(error) else None) or MemoryLimit(0, 0)
            device_types = {"cpu"} if is_of_host(error) or "CPU out of memory" in text else {"cuda", "xpu"}
            return cls(
                asked_bytes(text), room.used_bytes, room.limit_bytes, fullness(error), *_held(error, device_types)
            )
        except Exception:  # memory is short, and users' classes may raise: the caller goes on without
            return None

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that are held for any batch size."""
        return self.parameters_bytes + self.gradients_bytes + self.states_bytes

    @property
    def is_beyond_the_limit(self) -> bool:
        """Return whether the kept bytes and the request alone exceed the limit."""
        return bool(self.asked_bytes and self.limit_bytes) and self.kept_bytes + self.asked_bytes > self.limit_bytes

    def needed_for_one(self, samples: float, larger: MemoryRequest, larger_samples: float) -> int:
        """Return the bytes that would be in use for one sample, by the line through two demands.

        The kept bytes do not depend on the batch, but on the progress of the step: the second part of a batch finds the
        gradients of the first. So the line is drawn through the other bytes.

        Args:
            samples: The samples of the forward that asked for this.
            larger: An earlier demand, of a forward of `larger_samples`.

        Example:
            >>> first = MemoryRequest(8, 50, 60, parameters_bytes=10)
            >>> second = MemoryRequest(8, 40, 60, 10, parameters_bytes=10)
            >>> second.needed_for_one(51, first, 101)
            38
        """
        rest, larger_rest = self.used_bytes - self.kept_bytes, larger.used_bytes - larger.kept_bytes
        slope = max(0.0, (larger_rest - rest) / (larger_samples - samples))
        return int(self.used_bytes - slope * (samples - 1) + self.asked_bytes)

    def is_hopeless(self, samples: float, larger: MemoryRequest, larger_samples: float) -> bool:
        """Return whether not even one sample would fit; False if the numbers do not show it.

        The caller has checked that both requests were made at the same place.
        """
        are_comparable = (
            0 < self.asked_bytes == larger.asked_bytes
            and self.limit_bytes > 0
            and 0 < self.parameters_bytes == larger.parameters_bytes
            and 2 * samples <= larger_samples  # noise determines a line through two near points
        )
        needed_bytes = self.needed_for_one(samples, larger, larger_samples) if are_comparable else 0
        return needed_bytes > self.limit_bytes + _NOISE * self.asked_bytes


def total_and_free(text: str) -> tuple[int, int] | None:
    """Return the total and the free bytes that an allocator's text states; None if it states none.

    Example:
        >>> total_and_free("GPU 0 has a total capacity of 8.00 GiB of which 2.00 GiB is free.")
        (8589934592, 2147483648)
    """
    state = _TOTAL_AND_FREE.search(text)
    return None if state is None else (in_bytes(state[1], state[2]), in_bytes(state[3], state[4]))


def _stated(text: str) -> MemoryLimit | None:
    """Return the numbers in texts of torch's allocators for CUDA, ROCm and XPU, and of `MemLimit`.

    Memory that the caching allocator has reserved and not handed out counts as free, too.

    Example:
        >>> _stated("GPU 0 has a total capacity of 8.00 GiB of which 2.00 GiB is free.").share
        0.75
    """
    found = {
        name: in_bytes(match[1], match[2])
        for name, pattern in (("allocated", _ALLOCATED), ("unallocated", _UNALLOCATED), ("allowed", _ALLOWED))
        if (match := pattern.search(text)) is not None
    }
    state = total_and_free(text)
    if state is None:
        return None
    total_bytes, free_bytes = state
    if "allocated" not in found:
        return MemoryLimit(total_bytes - free_bytes, total_bytes)
    most_bytes = found["allocated"] + found.get("unallocated", 0) + free_bytes
    return MemoryLimit(found["allocated"], min(most_bytes, found.get("allowed", most_bytes)))


def _live_on_host() -> MemoryLimit | None:
    """Return the host's memory without freed memory that is kept, which a smaller batch would have reduced."""
    room = host_limit()
    return None if room is None else MemoryLimit(max(0, room.used_bytes - unused_heap()), room.limit_bytes)


def _held(error: BaseException, device_types: set[str]) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer states in the frames of `error`, on such devices."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0, 0, 0
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    parameters: dict[int, Any] = {}
    states: dict[int, Any] = {}
    for thing in _mentioned([frame for frame, _ in traceback.walk_tb(error.__traceback__)], kinds):
        if isinstance(thing, torch.nn.Module):
            parameters |= {id(parameter): parameter for parameter in thing.parameters()}
        else:
            held = thing.state.values() if isinstance(getattr(thing, "state", None), dict) else ()
            states |= {id(value): value for state in held if isinstance(state, dict) for value in state.values()}

    def total(things: Iterable[Any]) -> int:
        return sum(
            thing.numel() * thing.element_size()
            for thing in things
            if isinstance(thing, torch.Tensor) and thing.device.type in device_types
        )

    gradients = [parameter.grad for parameter in parameters.values()]
    return total(parameters.values()), total(gradients), total(states.values())


def _mentioned(frames: Iterable[FrameType], kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yield the objects of `kinds` that are variables of `frames`, or attributes of one."""
    seen: set[int] = set()
    for frame in frames:
        for value in list(frame.f_locals.values())[:_MOST_VALUES]:
            if id(value) in seen:
                continue
            seen.add(id(value))
            # By type: the `__class__` of a lazy object may import what it stands for.
            if issubclass(type(value), kinds):
                yield value
            elif type(value) is not ModuleType:
                held = list((attributes_of(value) or {}).values())[:_MOST_VALUES]
                yield from (each for each in held if issubclass(type(each), kinds))
