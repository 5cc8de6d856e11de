"""What a checkpoint costs: a durable save beside ``torch.save`` and fsync, and how long one in the background blocks.

Run it by hand: ``python tests/benchmarks/checkpoints.py [megabytes] [turns]``. Every turn runs all of them, in a
shuffled order, in one process; ratios are medians over turns, the first of which warms up.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from nbaccel import Accelerator


def model_of(megabytes: int) -> torch.nn.Module:
    """Parameters and AdamW state of `megabytes` all together, in 24 layers."""
    width = int((megabytes * 1e6 / 4 / 3 / 24) ** 0.5)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(24)])


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(megabytes: int = 600, turns: int = 8) -> None:
    torch.set_num_threads(2)
    accelerator = Accelerator()
    model = model_of(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)

        def raw() -> float:
            def save() -> None:
                with open(folder / "raw.pt", "wb") as file:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                    file.flush()
                    os.fsync(file.fileno())

            return seconds(save)

        def durable() -> float:
            return seconds(lambda: accelerator.save_state(folder / "durable"))

        def background() -> float:
            blocked = seconds(lambda: accelerator.save_state(folder / "background", blocking=False))
            accelerator._writer.join()
            return blocked

        ways = {"torch.save + fsync": raw, "again": raw, "save_state": durable, "blocked, blocking=False": background}
        rows: dict[str, list[float]] = {way: [] for way in ways}
        resident = []
        for turn in range(turns + 1):
            for way in random.sample(list(ways), len(ways)):
                took = ways[way]()
                if turn:
                    rows[way].append(took)
                resident.append(psutil.Process().memory_info().rss)
        size = sum(path.stat().st_size for path in (folder / "durable").iterdir())
    growth = (max(resident) - resident[0]) / size
    print(f"state {size / 1e6:.0f} MB, {turns} turns; resident memory grew by {growth:.2f} x that")
    for way, took in rows.items():
        ratios = [mine / theirs for mine, theirs in zip(took, rows["torch.save + fsync"], strict=True)]
        print(f"{way:26} median {statistics.median(took):6.3f} s   ratio {statistics.median(ratios):5.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
