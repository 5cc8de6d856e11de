"""Many items on two ranks: ``make bench ROWS=mapping``. Seconds of `map`, of equal shares, and of processes by hand.

10,000 texts whose lengths are log-normal (sigma 1), shuffled and sorted. The function waits as long as a device would
compute: a constant for each call, and a constant for each character of the padded batch; so two ranks are two devices
here, however many cores there are. All ways have batches of 16.

equal shares: ``accelerator.split_between_processes`` and a gather of the results, as in Accelerate's example of
distributed inference. by hand: what a person writes who knows the lengths: two processes, each with every second text
of the sorted list, nothing shared. Memory is that of a million items of which none computes anything.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.findings import Finding, options_of, tell
from nbaccel import Accelerator
from nbaccel.testing import run_ranks

_ITEMS, _BATCH = 10_000, 16
_MEDIAN = 100
_CALL_S, _CHARACTER_S = 0.002, 15e-6
_MILLION = 1_000_000


def texts(count: int = _ITEMS) -> list[str]:
    chance = random.Random(0)
    return ["x" * max(1, int(_MEDIAN * math.exp(chance.gauss(0.0, 1.0)))) for _ in range(count)]


def compute(batch: list[str]) -> list[int]:
    time.sleep(_CALL_S + _CHARACTER_S * len(batch) * max(map(len, batch)))
    return [len(text) for text in batch]


def by_map(items: list[str]) -> list[int]:
    return list(Accelerator(cpu=True).map(compute, items, batch_size=_BATCH))


def by_map_into_a_file(items: list[str], out: Path) -> list[int]:
    return list(Accelerator(cpu=True).map(compute, items, batch_size=_BATCH, out=out / "answers.jsonl"))


def by_equal_shares(items: list[str]) -> list[int]:
    accelerator = Accelerator(cpu=True)
    with accelerator.split_between_processes(items) as mine:
        found = [one for start in range(0, len(mine), _BATCH) for one in compute(mine[start : start + _BATCH])]
    gathered: list[int] = accelerator.gather_for_metrics(found, use_gather_object=True)
    return gathered


def by_hand(items: list[str]) -> list[int]:
    from nbaccel.base.world import World

    rank = World.from_env().rank
    order = sorted(range(len(items)), key=lambda number: -len(items[number]))[rank::2]
    found = {}
    for start in range(0, len(order), _BATCH):
        some = order[start : start + _BATCH]
        found.update(zip(some, compute([items[number] for number in some]), strict=True))
    return [found.get(number, 0) for number in range(len(items))]


def seconds(way: Callable[..., list[int]], items: list[str], *args: Any) -> float:
    """Run a way in two ranks; return the seconds of the slower one."""

    def timed() -> tuple[float, list[int]]:
        begun = time.perf_counter()
        found = way(items, *args)
        return time.perf_counter() - begun, found

    (first, one), (second, two) = run_ranks(2, timed, timeout_s=600)
    wanted = [len(text) for text in items]
    assert one == wanted or [a + b for a, b in zip(one, two, strict=True)] == wanted
    return max(first, second)


def memory() -> float:
    """Return by how much the memory of a rank grows while a million answers are made, in MB."""

    def grown() -> float:
        items = [str(number) for number in range(_MILLION)]
        accelerator = Accelerator(cpu=True)
        with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
            accelerator.map(len_of_each, items[:1000], out=Path(folder) / "first.jsonl")
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            answers = accelerator.map(len_of_each, items, out=Path(folder) / "answers.jsonl")
            assert len(answers) == _MILLION
            return (_status("VmHWM") - before) / 1e6

    (found,) = run_ranks(1, grown, timeout_s=600)
    return float(found)


def len_of_each(batch: list[str]) -> list[int]:
    return [len(text) for text in batch]


def _status(kind: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def findings(rounds: int) -> Iterator[Finding]:
    shuffled = texts()
    for turn in range(rounds):
        for name, items in {"shuffled": shuffled, "sorted": sorted(shuffled, key=len)}.items():
            with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
                found = {
                    "map": seconds(by_map, items),
                    "map into a file": seconds(by_map_into_a_file, items, Path(folder)),
                    "equal shares": seconds(by_equal_shares, items),
                    "by hand": seconds(by_hand, items),
                }
            what = f"10,000 texts, {name}" + (f", round {turn + 1}" if rounds > 1 else "")
            for way, took in found.items():
                yield Finding(what, way, took, "s")
            for way in ("map", "map into a file"):
                yield Finding(
                    f"speed over equal shares, {name}", way, found["equal shares"] / found[way], "", at_least=1.5
                )
                yield Finding(f"speed over by hand, {name}", way, found["by hand"] / found[way], "", at_least=0.95)
    yield Finding("memory that a million items need", "map into a file", memory(), "MB", at_most=100)


if __name__ == "__main__":
    options = options_of(__doc__, rounds=1)
    sys.exit(tell(findings(options.rounds), options.json))
