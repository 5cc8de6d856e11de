"""In a dry run, lines of the user start no program, and what a rank has from the notebook is parted from its files."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nbaccel.base.settings import RunSettings
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    return home


Run = Callable[..., tuple[Any, list[dict[str, Any]]]]


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    """Run a function in a rank of a dry run; return what it returns, and the records of lines that were not run."""
    ranks = tmp_path / "ranks"
    for name in ("records", "originals", "saves"):
        (ranks / name).mkdir(parents=True)

    def run(function: Callable[..., Any], start: str = "fork") -> tuple[Any, list[dict[str, Any]]]:
        part = "nbaccel.features.check.protected_files:ProtectedFiles", str(ranks)
        spec = LaunchSpec(
            FunctionTask(function), Devices(1), Start(start, "a test"), RunSettings(cpu=True), parts=(part,)
        )
        run, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
        try:
            if run.error is not None:
                raise run.error
            records = ranks / "records" / "rank-0.jsonl"
            lines = records.read_text().splitlines() if records.exists() else []
            return ended.values(0)["value"], [json.loads(line) for line in lines]
        finally:
            ended.close()

    return run


TOUCH = ("touch", "touched")


async def touches_asynchronously() -> tuple[bytes, int | None]:
    process = await asyncio.create_subprocess_exec(*TOUCH, stdout=subprocess.PIPE)
    return (await process.communicate())[0], process.returncode


def executes() -> int:
    if (child := os.fork()) == 0:
        os.execvp(TOUCH[0], TOUCH)
    return os.waitpid(child, 0)[1]


def reads_from_a_pipe() -> str:
    with os.popen("touch touched") as pipe:
        return pipe.read()


def starts_programs() -> list[Any]:
    with subprocess.Popen(TOUCH, stdin=subprocess.PIPE, cwd="/none") as process, ThreadPoolExecutor(1) as pool:
        return [
            process.communicate(b"input")[0],
            subprocess.run("touch touched", shell=True, capture_output=True, text=True, check=True).stdout,
            subprocess.check_output(args=TOUCH, executable="/none/such"),
            subprocess.getoutput("touch touched"),
            os.system("touch touched"),
            os.system(command="touch touched"),
            reads_from_a_pipe(),
            os.waitpid(os.posix_spawn(shutil.which("touch") or "", TOUCH, os.environ), 0)[1],
            os.spawnvp(os.P_WAIT, TOUCH[0], TOUCH),
            executes(),
            asyncio.run(touches_asynchronously()),
            pool.submit(subprocess.call, TOUCH).result(),
        ]


@pytest.mark.parametrize("start", ["fork", "zygote"])
def test_a_line_of_the_users_starts_no_program_and_is_recorded(run: Run, home: Path, start: str) -> None:
    values, records = run(starts_programs, start)
    assert values == [None, "", b"", "", 0, 0, "", 0, 0, 0, (b"", 0), 0]
    assert os.listdir(home) == []
    assert {record["file"] for record in records} == {__file__}
    assert {record["why"] for record in records} == {"it starts a program (touch touched)"}
    assert len({record["line"] for record in records}) == len(records) == 12


LIBRARY = """
import os, platform, shutil, subprocess
def asks():
    return subprocess.run(["echo", "it"], capture_output=True, text=True).stdout.strip(), platform.uname().system
def removes(path):
    os.remove(path)
"""


def test_a_library_starts_programs_and_removes_files(run: Run, home: Path, tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a_library.py").write_text(LIBRARY)
    for name in ("one", "other"):
        (tmp_path / name).touch()

    def calls() -> Any:
        import sys

        sys.path.append(str(tmp_path / "site-packages"))
        import a_library

        a_library.removes(tmp_path / "one")
        (tmp_path / "other").unlink()
        return a_library.asks()

    values, (record,) = run(calls)
    assert tuple(values) == ("it", "Linux")
    assert record["why"] == f"it removes {tmp_path}/other, which is outside of the working folder"
    assert not (tmp_path / "one").exists()
    assert (tmp_path / "other").exists()


def test_files_that_the_notebook_has_open_or_mapped_are_not_changed(run: Run, home: Path) -> None:
    log = open("log (deleted)", "w+")  # noqa: SIM115  # the notebook keeps it open
    log.write("from the notebook\n")
    log.flush()
    (home / "mapped").write_bytes(b"0" * mmap.PAGESIZE)
    with open("mapped", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)

    def changes() -> tuple[str, bytes]:
        log.write("from a rank\n")
        log.flush()
        mapped[:1] = b"1"
        log.seek(0)
        return log.read(), mapped[:2]

    values, records = run(changes)
    assert tuple(values) == ("from the notebook\nfrom a rank\n", b"10")
    assert records == []
    assert (home / "log (deleted)").read_text() == "from the notebook\n"
    assert (home / "mapped").read_bytes() == b"0" * mmap.PAGESIZE
    log.close()
    mapped.close()


def test_an_open_file_that_is_too_large_for_a_copy_can_only_be_read(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbaccel.features.check.inherited_files._MOST_COPIED_BYTES", 1)
    (home / "old.txt").write_text("old\n")
    file = open("old.txt", "r+")  # noqa: SIM115  # the notebook keeps it open

    def changes() -> str:
        text = next(file)
        try:
            os.write(file.fileno(), b"more")
        except OSError as error:
            return f"{text}{error.strerror}"
        return "written"

    assert run(changes)[0] == "old\nBad file descriptor"
    assert (home / "old.txt").read_text() == "old\n"
    file.close()


def modules_of_dry_runs() -> list[str]:
    import sys

    names = ("protected_files", "redirected_saves", "redirected_checkpoints", "kept_originals", "dry_run")
    return [module for module in sys.modules if module.startswith("nbaccel.") and module.endswith(names)]


def test_a_usual_run_loads_nothing_of_it(launcher: Launcher) -> None:
    spec = LaunchSpec(FunctionTask(modules_of_dry_runs), Devices(1), Start("zygote", "a test"), RunSettings(cpu=True))
    _, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
    try:
        assert ended.values(0)["value"] == []
    finally:
        ended.close()
