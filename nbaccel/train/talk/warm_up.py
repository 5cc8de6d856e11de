"""Warm-up: the first exchanges of a new process group over its devices, with known results. Runs in ranks.

NCCL connects the devices at the first collective of each kind, and allocates its buffers then, outside of torch's
allocator. So the warm-up runs before any measurement of memory. Where direct access between devices does not
work, behind an IOMMU or in some containers, the first exchange hangs, or its sums are wrong: the warm-up detects and
names that, before an epoch is lost. The program's thread waits with a limit and polls; the exchange runs in another
thread, since it may hang where NCCL connects, before there is anything to poll.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from nbaccel.aborting import abort_device_groups
from nbaccel.events import Waiting, emit

__all__ = ["LIMIT_S", "warm_up"]

LIMIT_S = 60.0
"""NCCL connects eight devices in about a second; a bad connection does not improve."""

_LOOK_UP_S = 0.5
_ABORT_S = 5.0
_LARGE = 1 << 20
"""Numbers, in 4 MB: more than NCCL sends by its protocols for short messages."""

_CURE = (
    "The devices are not connected in the way in which {backend} takes them to be. Set one of these before the ranks "
    "start (%env in a notebook) and try again: NCCL_P2P_DISABLE=1, if direct access between the GPUs does not work "
    "(behind an IOMMU, in some virtual machines); NCCL_SHM_DISABLE=1, or a container with --shm-size=1g, if shared "
    "memory is short. NCCL_DEBUG=INFO says what NCCL does."
)


def warm_up(rank: int, world_size: int, device: torch.device) -> None:
    """Exchange over `device` values that all ranks know in advance. Collective.

    Raises:
        TimeoutError: the exchange was not over after `LIMIT_S`; the groups are aborted.
        RuntimeError: wrong values arrived; or the backend's own error, with a note.
    """
    exchange = _Exchange(rank, world_size, device)
    waited_s = 0.0
    try:
        while not exchange.is_over(_LOOK_UP_S):
            waited_s += _LOOK_UP_S
            if waited_s >= LIMIT_S:
                raise TimeoutError(
                    f"rank {rank} of {world_size}: the first exchange of the process group over {device} "
                    f"({exchange.step}) was not over after {LIMIT_S:g} s. {_cure()}"
                )
            emit(Waiting(f"the first exchange of the process group ({exchange.step})", waited_s))
    except BaseException:
        abort_device_groups(_ABORT_S)
        raise
    if exchange.error is not None:
        raise exchange.error


class _Exchange:
    """The exchange, in its own thread.

    step: the current one, in words.  error: the error, once it is over.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.step = ""
        self.error: Exception | None = None
        self._rank, self._world_size, self._device = rank, world_size, device
        self._thread = threading.Thread(target=self._run, name="nbaccel-warm-up", daemon=True)
        self._thread.start()

    def is_over(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            wrong = [self._difference(received, expected) for received, expected in self._steps()]
            if any(wrong):  # only now: the peers need this rank in each of the exchanges
                raise RuntimeError(next(filter(None, wrong)))
        except Exception as error:
            error.add_note(_cure())
            self.error = error

    def _steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield received and expected tensors, one exchange after the other. Whole numbers, so that sums are exact."""
        numbers = torch.arange(_LARGE, dtype=torch.float32, device=self._device) % 1000
        ranks = self._world_size * (self._world_size - 1) / 2
        for count in (1, _LARGE):
            self.step = f"a sum of {count} number{'' if count == 1 else 's'}"
            total = numbers[:count] + self._rank
            dist.all_reduce(total)
            yield total, numbers[:count] * self._world_size + ranks
        self.step = "gathering"
        rows = [torch.empty_like(numbers) for _ in range(self._world_size)]
        dist.all_gather(rows, numbers + self._rank)
        yield torch.stack(rows), torch.stack([numbers + rank for rank in range(self._world_size)])
        self.step = "a broadcast"
        copy = numbers + self._rank
        dist.broadcast(copy, 0)
        yield copy, numbers

    def _difference(self, received: Tensor, expected: Tensor) -> str:
        """Return what is wrong in this exchange; empty if nothing is."""
        wrong = (received != expected).flatten().nonzero().flatten()
        if not len(wrong):
            return ""
        first = int(wrong[0])
        return (
            f"rank {self._rank} of {self._world_size}: {self.step} over {self._device} came out wrong in {len(wrong)} "
            f"of {received.numel()} numbers, {received.flatten()[first].item():g} instead of "
            f"{expected.flatten()[first].item():g} in number {first}. Nothing was trained."
        )


def _cure() -> str:
    return _CURE.format(backend=dist.get_backend().upper())
