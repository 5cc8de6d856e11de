"""Starts of 1 to 16 ranks from a warm process, in wall time of milliseconds.

"start" is from the call to its return, "entry" from the call to the end of a function that does nothing, in the last
rank to run it: between them lies how the launcher learns that its ranks have ended. "first DDP step" is from the call
to the end of the step in the slowest rank.

Raw is children of ``os.fork``: no launcher can be faster. torch's ``start_processes`` and Accelerate's
``notebook_launcher`` start ranks without a process group, Accelerate's ``debug_launcher`` and Fabric's with one; ours
is measured both ways. One rank is no row of ``notebook_launcher``: it calls the function where it is.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Make, Row, installed
from benchmarks.party import Bout, Sample, environment, free_port
from benchmarks.targets import AtMost

__all__ = ["LAUNCHES", "bout", "rows"]

_TURNS = {1: 6, 2: 20, 4: 5, 8: 3, 16: 2}
"""By number of ranks: where many share few cores, a turn is long."""

_NEEDS = {
    "Accelerate, notebook": "accelerate",
    "Accelerate, debug, group": "accelerate",
    "Fabric, group": "lightning",
}

Function = Callable[[], float]
"""What every rank does; it returns what the guard compares with raw's."""

Launch = Callable[[Callable[[Path], None], Path, int], object]
"""Runs a function of the folder in so many ranks."""


def _empty() -> float:
    return 0.0


def _grouped() -> float:
    """A collective, so that no rank leaves while others still connect to it."""
    _join()
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return 0.0 if ones.item() == torch.distributed.get_world_size() else float("nan")


def _first_step() -> float:
    _join()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((8, 16), 1.0 + torch.distributed.get_rank())).mean().backward()
    optimizer.step()
    return float(sum(parameter.sum().item() for parameter in model.parameters()))


def _join() -> None:
    if not torch.distributed.is_initialized():  # some launchers have done so
        torch.distributed.init_process_group("gloo")


def _marking(function: Function) -> Callable[[Path], None]:
    """`function`, and a file which tells that a rank has run it, when, and what came of it."""

    def run(folder: Path) -> None:
        told = function()
        Path(folder, f"{os.getpid()}-{time.monotonic_ns()}").write_text(repr(told))

    return run


def bout(launch: Launch, function: Function, ranks: int, until_mark: bool) -> Bout:
    """A launcher, timed; it is refused when a rank has not run the function by its return.

    until_mark: the turn is over with the last rank's mark, else with the launcher's return.
    """
    folder = tempfile.TemporaryDirectory(prefix="nbaccel-bench-")
    marks = Path(folder.name)
    marking = _marking(function)

    def turn() -> Sample:
        for mark in marks.iterdir():
            mark.unlink()
        began_ns, cpu_s = time.monotonic_ns(), time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):  # the launchers' greetings
            launch(marking, marks, ranks)
        ended_ns, cpu_s = time.monotonic_ns(), time.process_time() - cpu_s
        times = [int(mark.name.rpartition("-")[2]) for mark in marks.iterdir()]
        if len(times) != ranks:
            raise RuntimeError(f"{len(times)} of {ranks} ranks had run the function when the launcher returned")
        return Sample(((max(times) if until_mark else ended_ns) - began_ns) / 1e9, cpu_s)

    def told() -> torch.Tensor:
        """How many processes ran the function, how often, and what it returned."""
        found = list(marks.iterdir())
        pids = {mark.name.partition("-")[0] for mark in found}
        return torch.tensor([len(pids), len(found), sum(float(mark.read_text()) for mark in found)])

    return Bout(turn, told, folder.cleanup)


def _fork(function: Callable[[Path], None], folder: Path, ranks: int) -> None:
    port = free_port()
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ.update(environment(rank, ranks, port))
                function(folder)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _torch(function: Callable[[Path], None], folder: Path, ranks: int) -> None:
    port = free_port()

    def one(rank: int) -> None:
        os.environ.update(environment(rank, ranks, port))
        function(folder)

    torch.multiprocessing.start_processes(one, nprocs=ranks, start_method="fork")


def _accelerate(launcher: str, function: Callable[[Path], None], folder: Path, ranks: int) -> None:
    import accelerate

    getattr(accelerate, launcher)(function, (folder,), num_processes=ranks)


def _fabric(function: Callable[[Path], None], folder: Path, ranks: int) -> None:
    from lightning.fabric import Fabric

    Fabric(accelerator="cpu", devices=ranks, strategy="ddp_notebook").launch(lambda fabric: function(folder))


def _nbaccel(start_method: str, function: Callable[[Path], None], folder: Path, ranks: int) -> None:
    from nbaccel.launching.api import launch

    launch(function, ranks, (folder,), start_method=start_method, cpu=True)


_GROUP = ", group"
"""Those that have made the process group when the function begins; in ours the function makes it."""

LAUNCHES: Mapping[str, Launch] = {
    "raw": _fork,
    "torch": _torch,
    "Accelerate, notebook": partial(_accelerate, "notebook_launcher"),
    "Accelerate, debug, group": partial(_accelerate, "debug_launcher"),
    "Fabric, group": _fabric,
    "nbaccel, fork": partial(_nbaccel, "fork"),
    "nbaccel, zygote": partial(_nbaccel, "zygote"),
}


def _row(name: str, functions: Mapping[str, tuple[Launch, Function]], ranks: int, **options: Any) -> Row:
    until_mark = not name.startswith("start")
    makes: dict[str, Make] = {
        who: partial(bout, launch, function, ranks, until_mark)
        for who, (launch, function) in functions.items()
        if ranks > 1 or who != "Accelerate, notebook"
    }
    return Row(name, installed(makes, _NEEDS), unit="ms", turns=_TURNS[ranks], judged="wall", **options)


def rows() -> Sequence[Row]:
    empty = {name: (launch, _grouped if name.endswith(_GROUP) else _empty) for name, launch in LAUNCHES.items()}
    empty |= {name + _GROUP: (launch, _grouped) for name, launch in LAUNCHES.items() if name.startswith("nbaccel")}
    first_step = {name: (launch, _first_step) for name, launch in LAUNCHES.items()}
    targets = {"nbaccel, fork": AtMost(20), "nbaccel, fork, group": AtMost(40)}
    in_300_ms = {"nbaccel, fork": AtMost(300), "nbaccel, zygote": AtMost(300)}
    return [
        *(
            _row(f"{what} of {ranks} rank{'s' * (ranks > 1)}", empty, ranks, targets=targets if is_promised else {})
            for ranks in _TURNS
            for what, is_promised in (("start", ranks == 2), ("entry", False))
        ),
        _row("first DDP step of 2 ranks", first_step, 2, targets=in_300_ms),
    ]
