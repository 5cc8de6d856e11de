"""What a checkpoint takes on the disk, and of memory while it is saved: ``make bench ROWS=checkpoints``.

A model with AdamW of 600 MB, a fresh process for each way, three saves and a load. Memory is the highest resident size
(VmHWM) over the one before the first save, in units of the state; a file in the page cache is in nobody's. How long
saves and loads take is in `rows/saves.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.findings import Finding, options_of, tell
from benchmarks.party import Bout, Party
from benchmarks.rows.saves import OURS, OURS_BEHIND, Store, available

_SAVES = 3
_MOST_EXTRA = 1.2
"""Of the state, in the background: a copy of it, and what writing it needs."""


def resident_bytes(what: str) -> int:
    """Of this process now ("VmRSS"), or at most since `forget_peak` ("VmHWM")."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """From now on VmHWM counts anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _footprint(store: Store, megabytes: int) -> Tensor:
    """Bytes on the disk, and extra memory of saves and of a load, for each byte of state."""
    before = resident_bytes("VmRSS")
    forget_peak()
    for _ in range(_SAVES):
        store.save()
    saving = resident_bytes("VmHWM") - before
    on_disk = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
    before = resident_bytes("VmRSS")
    forget_peak()
    store.load()
    loading = resident_bytes("VmHWM") - before
    return torch.tensor([on_disk, saving, loading], dtype=torch.float64) / (megabytes * 1e6)


def _bout(make: Callable[[int], Store], megabytes: int) -> Bout:
    store = make(megabytes)
    return Bout(lambda: None, lambda: _footprint(store, megabytes), store.close)


def _measured(name: str, make: Callable[[int], Store], megabytes: int) -> list[float]:
    """In a process of its own."""
    party = Party(name, partial(_bout, make, megabytes), 1, ())
    try:
        footprint: list[float] = party.result().tolist()
        return footprint
    finally:
        party.close()


def report(megabytes: int) -> Iterator[Finding]:
    ways = {name: _measured(name, make, megabytes) for name, make in available().items()}
    most = {OURS: _MOST_EXTRA, OURS_BEHIND: _MOST_EXTRA}
    for at, what in enumerate(("bytes on the disk", "extra memory of a save", "extra memory of a load")):
        for way, measured in ways.items():
            yield Finding(
                f"{what}, {megabytes} MB", way, measured[at], "x state", at_most=most.get(way) if at == 1 else None
            )


def main() -> int:
    options = options_of(__doc__, megabytes=600)
    return tell(report(options.megabytes), options.json)


if __name__ == "__main__":
    sys.exit(main())
