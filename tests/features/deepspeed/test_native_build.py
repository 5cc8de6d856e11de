"""The native build of DeepSpeed's kernels: said before it begins, made once, and named where one was killed."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin, testing
from nbaccel.errors import RanksFailed
from nbaccel.features.deepspeed.native_build import kernels_of, move_stale_lock, named_locks
from nbaccel.utils import DummyOptim

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs the package deepspeed: make test-deepspeed"
)

run_ranks = functools.partial(testing.run_ranks, timeout_s=300)


def test_only_a_configurations_optimizer_and_a_disk_need_a_build() -> None:
    adam = {"optimizer": {"type": "AdamW"}}
    on_host = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert list(kernels_of(on_host)) == []
    assert list(kernels_of(adam)) == ["fused_adam"]
    assert list(kernels_of({**adam, **on_host})) == ["cpu_adam"]
    assert list(kernels_of({**adam, "zero_optimization": {"offload_optimizer": {"device": "none"}}})) == ["fused_adam"]
    assert list(kernels_of({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}})) == []
    assert list(kernels_of({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})) == ["async_io"]


def _config(kind: str, **zero: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 2, **zero},
        "optimizer": {"type": kind, "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    }


_began: list[float] = []
"""When this process has called `prepare`."""


def _prepare(config: dict[str, Any]) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config))
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    _began.append(time.time())
    return accelerator, *accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.1))


class _Asked(BaseException):
    """An engine has asked for a kernel: no `Exception`, of which DeepSpeed would make another one."""


def _asked_for(config: dict[str, Any], extensions: str) -> list[str]:
    """Return the kernels that an engine of this configuration loads, which are not built here."""
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    from deepspeed.ops.op_builder.builder import OpBuilder

    def ask(self: Any, verbose: bool = True) -> Any:
        raise _Asked(self.name)

    OpBuilder.jit_load = ask
    warnings.simplefilter("ignore")  # that it builds
    try:
        _prepare(config)
    except _Asked as asked:
        return [str(asked)]
    return []


@needs_deepspeed
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_the_kernels_that_are_named_are_those_that_the_engine_loads(
    kind: str, is_offloaded: bool, tmp_path: Path
) -> None:
    config = _config(kind, **({"offload_optimizer": {"device": "cpu"}} if is_offloaded else {}))
    assert run_ranks(1, lambda: _asked_for(config, str(tmp_path))) == [list(kernels_of(config))]


# -- locks


def _look_older(path: Path, seconds: float) -> None:
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def _hold(lock: Path, acquire: str) -> subprocess.Popen[bytes]:
    """Start a process that takes a lock, and waits."""
    program = f"lock = {str(lock)!r}\n{acquire}\nprint(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


AS_TORCH = "import os; os.open(lock, os.O_CREAT | os.O_EXCL)"
WITH_NAME = """
from nbaccel.features.deepspeed.native_build import named_locks
from torch.utils import cpp_extension
with named_locks():
    assert cpp_extension.FileBaton(lock).try_acquire()
"""


def test_the_lock_of_a_killed_build_is_moved_away_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    assert move_stale_lock(tmp_path) == ""
    lock = tmp_path / "lock"
    holder = _hold(lock, AS_TORCH)
    try:
        assert f"waits for the build of process {holder.pid}" in move_stale_lock(tmp_path)
        assert lock.exists()
    finally:
        holder.kill()
        holder.communicate()
    _look_older(lock, 120)
    assert "may go on, on another machine or as another user: this run waits" in move_stale_lock(tmp_path)
    _look_older(lock, 500)
    written = tmp_path / "kernel.o"
    written.touch()
    assert "may go on" in move_stale_lock(tmp_path)
    _look_older(written, 500)
    said = move_stale_lock(tmp_path)
    assert f"{lock} was left by a build that was killed, 62" in said
    assert not lock.exists()
    assert len(list(tmp_path.glob("lock.left-*"))) == 1


def test_a_lock_that_says_whose_it_is_is_moved_away_at_once(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holder = _hold(lock, WITH_NAME)
    try:
        assert f"waits for the build of process {holder.pid}" in move_stale_lock(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    elsewhere = lock.read_text(encoding="utf-8").replace('"machine": "', '"machine": "other-')
    assert "was left by a build that was killed, " in move_stale_lock(tmp_path)
    assert not lock.exists()
    lock.write_text(elsewhere, encoding="utf-8")
    assert "may go on, on another machine" in move_stale_lock(tmp_path)


def test_locks_are_torchs_own_again_after_an_engine(tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    plain = cpp_extension.FileBaton
    with named_locks():
        assert cpp_extension.FileBaton is not plain
        lock = cpp_extension.FileBaton(str(tmp_path / "lock"))
        assert lock.try_acquire()
        assert not cpp_extension.FileBaton(str(tmp_path / "lock")).try_acquire()
        lock.release()
    assert cpp_extension.FileBaton is plain
    assert not list(tmp_path.iterdir())


# -- real builds

PROGRAM = """
import json, torch
from nbaccel import launch
from nbaccel.features.deepspeed.native_build import import_deepspeed
from features.deepspeed.test_native_build import train

if __name__ == "__main__":
    import_deepspeed(torch.device("cpu"))
    print("value", json.dumps(launch(train, 2, cpu=True).value), flush=True)
"""


def train() -> list[list[float]]:
    """Train two steps by the kernel of a configuration."""
    show = warnings.showwarning

    def timed(message: Any, *args: Any, **kwargs: Any) -> None:
        show(f"after {time.time() - _began[0]:.1f} s: {message}", *args, **kwargs)

    warnings.showwarning = timed
    accelerator, model, optimizer = _prepare(_config("AdamW"))
    return _steps(accelerator, model, optimizer)


def _steps(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> list[list[float]]:
    for number in (1.0, 2.0):
        accelerator.backward(model(torch.full((2, 4), number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [value.flatten().tolist() for value in accelerator.get_state_dict(model).values()]


class _Build:
    """A program whose ranks build a kernel into a folder that is empty at first.

    Args:
        folder: Where extensions of torch are built.
        compiler: The command in place of ``c++``.
    """

    def __init__(self, folder: Path, compiler: str = "c++") -> None:
        self.built = folder / "fused_adam"
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}"
        paths = os.pathsep.join(map(str, Path(__file__).parents[2:4]))
        environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "CXX": compiler, "PYTHONPATH": paths}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def builder(self) -> psutil.Process | None:
        """Return the process that has the lock, once a compiler works in the folder."""
        try:
            holder = json.loads((self.built / "lock").read_text(encoding="utf-8"))["process"]
        except (OSError, ValueError):
            return None
        return psutil.Process(holder) if any(self.compilers()) else None

    def compilers(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == str(self.built):
                    yield process

    def until(self, is_so: Any, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := is_so():
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        pytest.fail(f"not seen in {seconds:.0f} s, ended with {self.process.poll()}:\n{self.said}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@needs_deepspeed
@pytest.mark.timed
@pytest.mark.timeout(900)
def test_a_build_that_was_killed_is_named_by_the_next_run_which_begins_it_again(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    first = _Build(tmp_path)
    try:
        builder = first.until(first.builder, 200)
        assert f"DeepSpeed builds fused_adam once, 2 to 5 minutes: {first.built}" in first.said
        builder.send_signal(signal.SIGKILL)
        assert first.process.wait(120) != 0
        assert "was killed" in first.said
        assert not list(first.compilers())
    finally:
        first.end()
    assert (first.built / "lock").exists()
    assert set(os.listdir("/dev/shm")) <= shared
    second = _Build(tmp_path)
    try:
        second.until(second.builder, 200)  # it begins again
        [seconds] = re.findall(r"after ([\d.]+) s: \S+/lock was left by a build that was killed", second.said)
        assert float(seconds) <= 5
    finally:
        second.process.send_signal(signal.SIGINT)
        second.process.wait(120)
    assert not list(second.compilers())
    assert set(os.listdir("/dev/shm")) <= shared


@needs_deepspeed
@pytest.mark.timeout(3000)
def test_a_kernel_is_built_once_and_steps_as_torchs_optimizer(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"  # a real one, which does not optimize: a third of the time
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n', encoding="utf-8")
    compiler.chmod(0o700)
    values, written = [], []
    for is_first in (True, False):
        run = _Build(tmp_path, str(compiler))
        try:
            assert run.process.wait(1400) == 0, run.said
        finally:
            run.end()
        assert ("DeepSpeed builds fused_adam once" in run.said) is is_first
        values.append(json.loads(run.said.rpartition("value ")[2]))
        [built] = run.built.glob("*.so")
        written.append(built.stat().st_mtime_ns)
    assert written[0] == written[1]
    assert values[0] == values[1]

    def by_torch() -> list[list[float]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        return _steps(accelerator, *accelerator.prepare(model, optimizer))

    [wanted] = run_ranks(1, by_torch)
    for one, other in zip(values[0], wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def _without_a_compiler(folder: str) -> None:
    os.environ["PATH"] = os.environ["TORCH_EXTENSIONS_DIR"] = folder
    os.environ.pop("CXX", None)
    _prepare(_config("AdamW"))


@needs_deepspeed
def test_a_compiler_that_is_missing_is_named_with_its_package(tmp_path: Path) -> None:
    ninja = shutil.which("ninja")
    assert ninja is not None
    (tmp_path / "ninja").symlink_to(ninja)
    with pytest.raises(RanksFailed, match=r"compiles fused_adam .* c\+\+ is not here: apt-get install g\+\+"):
        run_ranks(1, lambda: _without_a_compiler(str(tmp_path)))
