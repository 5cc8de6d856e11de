"""A notebook without a kernel: IPython's shell and our magics in the test process; its ranks, if any, are real."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbaccel.base.hardware import Survey
from nbaccel.errors import LaunchRefused
from nbaccel.launching.gpu_trouble import TorchBuild
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.runs import Runs
from nbaccel.notebook.magics import AccelerateMagics
from nbaccel.notebook.session import Session


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fresh shell without our extension."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setattr(atexit, "register", lambda function, *args: function)  # IPython's handlers would pile up
    main = sys.modules["__main__"]
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor" if InteractiveShell.colors.default_value == "NoColor" else "nocolor"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    yield shell
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


@dataclass
class RecordingLauncher:
    """Takes the place of a `Launcher`: keeps what it was asked to run, and starts nothing."""

    specs: list[LaunchSpec] = field(default_factory=list)
    shown_ranks: Any = None
    post_mortem: Any = None
    helpers: dict[int, str] = field(default_factory=dict)
    runs: Runs = field(default_factory=Runs)
    last_run: Any = None

    def remember(self, run: Any, post_mortem: Any) -> None:
        """Do nothing: no run ends."""

    def run(self, spec: LaunchSpec, watching: RunObservers, occupied: str = "") -> Any:
        self.specs.append(spec)
        self.shown_ranks = watching.shown_ranks
        raise LaunchRefused("recorded")

    @property
    def spec(self) -> LaunchSpec:
        return self.specs[-1]


@dataclass
class Cell:
    """What became of one cell."""

    result: Any
    stdout: str
    stderr: str

    @property
    def value(self) -> Any:
        return self.result.result

    @property
    def error(self) -> BaseException | None:
        return self.result.error_before_exec or self.result.error_in_exec


@dataclass
class Notebook:
    """The shell with our magics. `run` runs a cell as a front end would; `names` are its variables."""

    shell: Any
    session: Session
    capsys: Any

    @property
    def names(self) -> dict[str, Any]:
        namespace: dict[str, Any] = self.shell.user_ns
        return namespace

    def run(self, cell: str) -> Cell:
        self.capsys.readouterr()
        result = self.shell.run_cell(cell, store_history=True)
        return Cell(result, *self.capsys.readouterr())

    def plan(self, cell: str) -> LaunchSpec:
        """The launch that a cell asks for, by a launcher that only records."""
        launcher = self.session.launcher
        assert isinstance(launcher, RecordingLauncher)
        ran = self.run(cell)
        assert str(ran.error) == "recorded", ran.error
        return launcher.spec


def _notebook(shell: Any, session: Session, capsys: Any) -> Iterator[Notebook]:
    magics = AccelerateMagics(shell, session)
    magics.install()
    yield Notebook(shell, session, capsys)
    magics.remove()


@pytest.fixture(autouse=True)
def torch_for_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are made up here, so what the installed torch was built for says nothing about them."""
    monkeypatch.setattr(TorchBuild, "loaded", classmethod(lambda cls: None))


@pytest.fixture
def recorder() -> RecordingLauncher:
    return RecordingLauncher()


@pytest.fixture
def survey() -> Survey:
    """The machine that `planned` sees; a test module may put another in its place."""
    return Survey(cpu_count=4)


@pytest.fixture
def planned(shell: Any, recorder: RecordingLauncher, survey: Survey, capsys: Any) -> Iterator[Notebook]:
    """A notebook whose launches are recorded instead of run."""
    session = Session(shell, recorder, survey=lambda: survey)  # type: ignore[arg-type]
    session.start_zygote = lambda: None  # type: ignore[method-assign]
    yield from _notebook(shell, session, capsys)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """One launcher for this folder; what it starts lives as long as the test process, so it starts before a test."""
    environ = dict(os.environ)
    import torch._dynamo  # noqa: F401  # sets a variable, which the guard of every test would report

    os.environ.update(environ)
    launcher = Launcher()
    launcher.resources.guard("+0")  # nobody has the number 0
    launcher.resources.guard("-0")
    launcher.resources.new_log()
    launcher.resources.zygote()
    yield launcher
    launcher.close()


@pytest.fixture
def notebook(launcher: Launcher, shell: Any, capsys: Any) -> Iterator[Notebook]:
    """A notebook whose cells run in real ranks on the CPU."""
    launcher.post_mortem = None  # of another test's run
    yield from _notebook(shell, Session(shell, launcher), capsys)
