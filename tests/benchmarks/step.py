"""What a prepared step costs beside the raw one, in CPU time of one process: ``python tests/benchmarks/step.py``.

Turns of raw, prepared and raw again come in random order, so that the machine's mood falls on all of them, and each
turn trains a new model: where its memory lies is worth some microseconds. The ratio is that of the medians, and the
second raw row says how far two equal things lie apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator

_BATCHES = 300


def _things() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(_BATCHES * 8, 64)), batch_size=8)
    return model, optimizer, loader


def raw_turn() -> Callable[[], None]:
    model, optimizer, loader = _things()

    def turn() -> None:
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return turn


def prepared_turn(**options: Any) -> Callable[[], None]:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*_things())

    def turn() -> None:
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    return turn


def measure(rows: dict[str, Callable[[], Callable[[], None]]], rounds: int) -> dict[str, float]:
    """Median CPU microseconds per step of each row."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name in random.sample(list(rows), len(rows)):
            turn = rows[name]()
            turn()  # the first one allocates
            start = time.process_time()
            turn()
            turn()
            seconds[name].append((time.process_time() - start) / 2)
    return {name: statistics.median(values) / _BATCHES * 1e6 for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = measure({"raw": raw_turn, "prepared": prepared_turn, "raw again": raw_turn}, rounds)
    for name, microseconds in rows.items():
        print(f"{name:10} {microseconds:8.1f} us per step   {microseconds / rows['raw']:.3f} x raw")


if __name__ == "__main__":
    main()
