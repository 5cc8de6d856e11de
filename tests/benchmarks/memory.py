"""What a rank holds that it shares with nobody: ``make bench ROWS=memory``. Private memory after an epoch, over raw's.

Each way is a warm process of its own that starts two ranks, as a notebook does; in them the same small training, whose
parameters must be raw's. Private is what the system would get back if the rank ended (Private_Clean + Private_Dirty of
its smaps_rollup), so nothing of what the rank shares with the process that it was forked from.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import loops
from benchmarks.findings import Finding, options_of, tell
from benchmarks.harness import installed
from benchmarks.loops import Training
from benchmarks.party import Bout, ContenderFailed, Party
from benchmarks.rows.starts import LAUNCHES, Launch

RANKS = 2
_MOST_MIB = 4
_TRAINING = Training(batches=50)
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Way:
    """How ranks are started, and the training in them.  package: what the notebook has imported."""

    launch: Launch
    train: Callable[[Training], Bout]
    package: str


def _like_a_cell(start_method: str, function: Callable[[Path], None], folder: Path, ranks: int) -> None:
    from nbaccel.launching.api import launch

    launch(function, ranks, (folder,), start_method=start_method, cpu=True, setup="nbaccel.train.setup:setup_rank")


WAYS: Mapping[str, Way] = {
    "raw": Way(LAUNCHES["raw"], loops.raw, "torch"),
    "raw again": Way(LAUNCHES["raw"], loops.raw, "torch"),
    "Accelerate": Way(LAUNCHES["Accelerate, notebook"], loops.accelerate, "accelerate"),
    "Fabric": Way(LAUNCHES["raw"], loops.fabric, "lightning.fabric"),  # which finds torchrun's variables there
    "nbaccel, fork": Way(partial(_like_a_cell, "fork"), loops.nbaccel, "nbaccel"),
    "nbaccel, zygote": Way(partial(_like_a_cell, "zygote"), loops.nbaccel, "nbaccel"),
}
_NEEDS = {"Accelerate": "accelerate", "Fabric": "lightning"}


def private_mib() -> float:
    """Of this process."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0].startswith("Private_")) / 1024


def _train(train: Callable[[Training], Bout], folder: Path) -> None:
    """In a rank: an epoch, and a file that tells what it left."""
    bout = train(_TRAINING)
    bout.turn()
    told = {"mib": private_mib(), "parameters": bout.result().tolist()}
    Path(folder, str(os.getpid())).write_text(json.dumps(told))


def launched(way: Way) -> Bout:
    """In a process of its own; what came of the last turn is the private memory of each rank, and its parameters."""
    __import__(way.package)
    folder = tempfile.TemporaryDirectory(prefix="nbaccel-bench-")
    files = Path(folder.name)

    def function(folder: Path) -> None:
        _train(way.train, folder)

    def turn() -> None:
        for file in files.iterdir():
            file.unlink()
        with contextlib.redirect_stdout(io.StringIO()):  # the launchers' greetings
            way.launch(function, files, RANKS)
        if (ran := len(list(files.iterdir()))) != RANKS:
            raise RuntimeError(f"{ran} of {RANKS} ranks have trained to the end")

    def told() -> torch.Tensor:
        found = [json.loads(file.read_text()) for file in files.iterdir()]
        return torch.tensor([[one["mib"], *one["parameters"]] for one in found])

    return Bout(turn, told, folder.cleanup)


def private_of(name: str, way: Way, turns: int, expected: np.ndarray[Any, Any] | None) -> tuple[float, Any]:
    """Median MiB of a rank, and the parameters.

    Raises:
        ContenderFailed: its parameters are not the expected ones.
    """
    party = Party(name, partial(launched, way), 1, ())
    try:
        told = []
        for _ in range(turns):
            party.turn()
            told.append(party.result().reshape(RANKS, -1))
    finally:
        party.close()
    parameters = told[-1][:, 1:]
    if expected is not None and not np.abs(parameters - expected).max() <= _TOLERANCE:
        raise ContenderFailed(f"{name}: WRONG RESULT: its parameters are not raw's")
    return statistics.median(float(mib) for each in told for mib in each[:, 0]), parameters


def findings(turns: int) -> Iterator[Finding]:
    raw_mib, expected = private_of("raw", WAYS["raw"], turns, None)
    what = f"private memory of each of {RANKS} ranks after an epoch"
    yield Finding(what, "raw", raw_mib, "MiB")
    for name, way in installed(WAYS, _NEEDS).items():
        if name != "raw":
            mib, _ = private_of(name, way, turns, expected)
            target = _MOST_MIB if name.startswith("nbaccel") else None
            yield Finding(f"{what}, over raw's", name, mib - raw_mib, "MiB", at_most=target)


def main() -> int:
    options = options_of(__doc__, turns=5)
    return tell(findings(options.turns), options.json)


if __name__ == "__main__":
    sys.exit(main())
