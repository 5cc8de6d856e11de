"""What the programs of this folder share: a card that is cut down to a T4, work for it, and what stands in on the host.

A program is told its device, "cuda" or "cpu". On the host, where it is rehearsed, a `MemLimit` stands in for the
card's allocator, and nothing has to be waited for.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbaccel.testing import MemLimit

T4_BYTES = 15 * 2**30
_DRIVERS_BLOCK = 2 * 2**20
_SLEEP_CYCLES = 2_000_000  # about a millisecond


def exactly() -> None:
    """Single precision is to be that."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def busy(device: str, place: str | None = None) -> None:
    """Give the device work for a millisecond, which the program does not wait for."""
    if device == "cuda":
        with torch.cuda.device(place):
            torch.cuda._sleep(_SLEEP_CYCLES)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reserved_bytes(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else 0


def allocated_bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


class Limit(Protocol):
    """refusals: how often something did not fit.  live_bytes: what is held now."""

    @property
    def refusals(self) -> int: ...

    @property
    def live_bytes(self) -> int: ...


class _CardLimit:
    """The card's own allocator refuses (pytorch #69688: it alone keeps to the fraction)."""

    def __init__(self) -> None:
        self._before = self._ooms()

    @staticmethod
    def _ooms() -> int:
        return int(torch.cuda.memory_stats().get("num_ooms", 0))

    @property
    def refusals(self) -> int:
        return self._ooms() - self._before

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated()


@contextmanager
def limited(device: str, limit_bytes: int, on_host_bytes: int) -> Iterator[Limit]:
    """This process has `limit_bytes` of the card while the block runs, or a stand-in for it `on_host_bytes`."""
    if device == "cpu":
        with MemLimit(on_host_bytes) as limit:
            yield limit
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), 0)
    try:
        yield _CardLimit()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


@dataclass
class Memory:
    """peak: bytes that the block had at most, over what was there before it."""

    peak: int = 0


@contextmanager
def memory_of(device: str) -> Iterator[Memory]:
    """Nothing is counted on the host."""
    memory = Memory()
    if device == "cpu":
        yield memory
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield memory
    memory.peak = torch.cuda.max_memory_allocated() - before


class Filler:
    """Memory of the card that somebody else has: by the driver, past torch's allocator, whose cached blocks stay."""

    def __init__(self, device: str) -> None:
        self._held: list[Any] = []
        self._driver = ctypes.CDLL("libcuda.so.1") if device == "cuda" else None
        if self._driver is not None:
            torch.ones(1, device=device)  # the context that the memory is of
            torch.cuda.synchronize()

    def fill(self, all_but_bytes: int) -> int:
        """Take all but so many bytes; how many are free then. Blocks of the driver are 2 MiB."""
        self.free()
        if self._driver is None:
            return all_but_bytes
        free, _ = torch.cuda.mem_get_info(0)
        size = free - all_but_bytes
        while size >= _DRIVERS_BLOCK:
            size -= size % _DRIVERS_BLOCK
            pointer = ctypes.c_uint64()
            if self._driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0:
                self._held.append(pointer)
                free, _ = torch.cuda.mem_get_info(0)
                size = free - all_but_bytes
            else:
                size //= 2
        return torch.cuda.mem_get_info(0)[0]

    def free(self) -> None:
        for pointer in self._held:
            assert self._driver is not None
            self._driver.cuMemFree_v2(pointer)
        self._held.clear()


def release(device: str = "cuda") -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Training:
    """How to make a model with its optimizer, its loss, and a batch of n samples on the host."""

    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]


class _Language(nn.Module):
    """A causal language model by hand: nothing is downloaded, and no other library is needed."""

    def __init__(self, vocabulary: int, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTC = self.tokens(tokens_BT) + self.positions
        for block in self.blocks:
            hidden_BTC = block(hidden_BTC, src_mask=self.mask, is_causal=True)
        logits_BTV: Tensor = self.head(hidden_BTC)
        return logits_BTV


def _next_token(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    logits_BTV = model(tokens_BT)[:, :-1].float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def _language(vocabulary: int, width: int, depth: int, context: int) -> Training:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = _Language(vocabulary, width, depth, context)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    return Training(make, _next_token, lambda size: torch.zeros(size, context, dtype=torch.int64))


def training_of(device: str) -> Training:
    """GPT-2's size on a card, some kilobytes on the host."""
    return _language(50257, 768, 12, 512) if device == "cuda" else _language(64, 32, 2, 16)
