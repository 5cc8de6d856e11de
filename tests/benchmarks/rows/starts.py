"""Starts of two ranks from a warm process, each way from the call to its return, in wall time of milliseconds.

Raw is two children of ``os.fork`` that end at once: no launcher can be faster. Accelerate's ``notebook_launcher``
starts ranks without a process group, its ``debug_launcher`` and Fabric's start them with one; ours is measured both
ways.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Row, installed
from benchmarks.party import Bout

__all__ = ["rows"]

_RANKS = 2


def _empty(marks: Path) -> None:
    """What every rank does: leave a mark, by which the guard knows that it ran."""
    (marks / str(os.getpid())).touch()


def _grouped(marks: Path) -> None:
    """The same in a process group."""
    torch.distributed.init_process_group("gloo")
    _empty(marks)


def _bout(launch: Callable[[Path], object]) -> Bout:
    folder = tempfile.TemporaryDirectory(prefix="nbaccel-bench-")
    marks = Path(folder.name)

    def turn() -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # the launchers' greetings
            launch(marks)

    def ran() -> torch.Tensor:
        """Ranks of the first turn."""
        return torch.tensor(len(list(marks.iterdir())))

    return Bout(turn, ran, folder.cleanup)


def _raw() -> Bout:
    def launch(marks: Path) -> None:
        children = []
        for _ in range(_RANKS):
            pid = os.fork()
            if pid == 0:
                _empty(marks)
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)

    return _bout(launch)


def _accelerate(launcher: str) -> Bout:
    import accelerate

    start = getattr(accelerate, launcher)
    return _bout(lambda marks: start(_empty, (marks,), num_processes=_RANKS))


def _fabric() -> Bout:
    from lightning.fabric import Fabric

    return _bout(
        lambda marks: Fabric(accelerator="cpu", devices=_RANKS, strategy="ddp_notebook").launch(
            lambda fabric: _empty(marks)
        )
    )


def _nbaccel(start_method: str, function: Callable[[Path], None]) -> Bout:
    from nbaccel.launch.functions import launch

    return _bout(lambda marks: launch(function, _RANKS, (marks,), start_method=start_method, cpu=True))


def rows() -> Sequence[Row]:
    makes: dict[str, Callable[[], Bout]] = {
        "raw": _raw,
        "Accelerate, notebook": partial(_accelerate, "notebook_launcher"),
        "Accelerate, debug, group": partial(_accelerate, "debug_launcher"),
        "Fabric, group": _fabric,
        **{
            f"nbaccel, {start}{also}": partial(_nbaccel, start, function)
            for start in ("fork", "zygote")
            for also, function in (("", _empty), (", group", _grouped))
        },
    }
    needs = {name: "lightning" if "Fabric" in name else "accelerate" for name in makes if name[0] in "AF"}
    return [Row("start of 2 ranks", installed(makes, needs), unit="ms", turns=10, judged="wall")]
