from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from nbaccel.launching.ipc import reaper
from nbaccel.launching.ipc.reaper import kill_session, session_members
from nbaccel.launching.launcher import LauncherResources

_TREE = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "60"])
subprocess.Popen(["sleep", "60"], start_new_session=True)
print("up", flush=True)
time.sleep(60)
"""


def _tree() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _TREE], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_session_and_descendants_that_left_it_are_found_and_killed() -> None:
    process = _tree()
    assert len(session_members([process.pid])) == 3
    kill_session(process.pid)
    assert process.wait(5) == -signal.SIGKILL
    assert session_members([process.pid]) == set()
    assert process.stdout is not None
    process.stdout.close()


def test_what_is_left_of_a_session_is_found_when_its_leader_has_ended() -> None:
    process = _tree()
    started = session_members([process.pid]) - {process.pid}
    try:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # as the kernel finds a rank: ended, not reaped
        assert session_members([process.pid]) == {pid for pid in started if os.getsid(pid) == process.pid} != set()
    finally:
        kill_session(process.pid, *started)
        process.wait(5)
        assert process.stdout is not None
        process.stdout.close()


def test_no_other_process_is_looked_into_where_nothing_is_left_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_into: list[int] = []
    look = reaper._parent_and_session

    def noting(pid: int) -> tuple[int, int] | None:
        looked_into.append(pid)
        return look(pid)

    monkeypatch.setattr(reaper, "_parent_and_session", noting)
    process = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert session_members([process.pid]) == set()
    assert looked_into == [process.pid]
    process.wait()


_HOLDER = """
import mmap, os, sys, time
kept = []
for how, path in (pair.split("=") for pair in sys.argv[1:]):
    fd = os.open(path, os.O_RDWR)
    if how != "open":
        kept.append(mmap.mmap(fd, 4096, trackfd=False) if sys.version_info >= (3, 13) else mmap.mmap(fd, 4096))
        os.close(fd)
print("up", flush=True)
time.sleep(60)
"""


def _holder(*what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _HOLDER, *what], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_what_killed_processes_have_of_nccls_memory_goes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "_SHM", str(tmp_path))
    for name in ("nccl-opened", "nccl-mapped", "nccl-others", "nccl-nobodys", "torch_1"):
        (tmp_path / name).write_bytes(bytes(4096))
    process = _holder(*(f"{how}={tmp_path / name}" for how, name in _HELD))
    bystander = _holder(f"map={tmp_path / 'nccl-others'}")
    try:
        kill_session(process.pid)
        assert sorted(os.listdir(tmp_path)) == ["nccl-nobodys", "nccl-others", "torch_1"]
        assert bystander.poll() is None
    finally:
        for each in (process, bystander):
            each.kill()
            each.wait(5)
            assert each.stdout is not None
            each.stdout.close()


_HELD = (("open", "nccl-opened"), ("map", "nccl-mapped"), ("map", "torch_1"))


def test_a_rank_whose_kernel_has_died_gives_nccls_memory_back_itself(tmp_path: Path) -> None:
    (tmp_path / "nccl-mine").touch()
    program = f"""
import os
from nbaccel.launching.ipc import reaper
reaper._SHM = {str(tmp_path)!r}
held = open({str(tmp_path / "nccl-mine")!r})
reaper.kill_session(os.getpid(), spare=os.getpid())
"""
    subprocess.run([sys.executable, "-c", program], check=True, start_new_session=True, timeout=20)
    assert os.listdir(tmp_path) == []


def test_a_machine_without_shared_memory_has_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "_SHM", "/nowhere")
    assert reaper.segments_of([os.getpid()]) == set()


def test_processes_of_others_are_left_alone() -> None:
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    process = _tree()
    kill_session(process.pid)
    process.wait(5)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_guardian_buries_sessions_and_folders_when_its_kernel_is_killed() -> None:
    folder = tempfile.mkdtemp()
    program = f"""
import os, subprocess, time
from nbaccel.launching.launcher import LauncherResources
resources = LauncherResources()
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
resources.guard(f"+{{child.pid}}")
resources.guard({folder!r})
print(child.pid, resources._reaper.pid, flush=True)
time.sleep(60)
"""
    kernel = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    pids = [int(pid) for pid in kernel.stdout.readline().split()]
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    deadline = time.monotonic() + 2
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_is_alive(pid) for pid in pids)
    assert not os.path.exists(folder)


def test_the_reaper_ends_with_resources_that_are_closed() -> None:
    resources = LauncherResources()
    resources.guard("+0")
    resources.guard("-0")
    process = resources._reaper
    assert process is not None
    resources.close()
    resources.close()  # closes nobody else's descriptor
    assert process.returncode == 0


def test_a_child_of_the_user_does_not_keep_the_reaper() -> None:
    resources = LauncherResources()
    resources.guard("+0")
    resources.guard("-0")
    process = resources._reaper
    assert process is not None
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    closing = threading.Thread(target=resources.close, daemon=True)
    closing.start()
    closing.join(5)
    is_closed = not closing.is_alive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert is_closed
    assert process.returncode == 0


def test_resources_are_closed_while_ranks_run_and_they_end_with_the_process() -> None:
    program = """
import subprocess
from nbaccel.launching.launcher import LauncherResources
resources = LauncherResources()
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
resources.guard(f"+{child.pid}")
print(child.pid, resources._reaper.pid, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=20)
    assert done.returncode == 0
    deadline = time.monotonic() + 2
    while any(_is_alive(int(pid)) for pid in done.stdout.split()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(_is_alive(int(pid)) for pid in done.stdout.split())


def test_a_guardian_that_died_is_replaced() -> None:
    resources = LauncherResources()
    resources.guard("+0")
    first = resources._reaper
    assert first is not None
    first.kill()
    first.wait()
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    resources.guard(f"+{child.pid}")
    assert resources._reaper is not first
    assert resources._guarded == {"+0", f"+{child.pid}"}
    child.kill()
    child.wait()
    resources.guard(f"-{child.pid}")
    resources.guard("-0")
    assert resources._guarded == set()
    resources.close()


def test_the_guardian_needs_only_the_standard_library() -> None:
    source = Path(reaper.__file__).read_text()
    assert "nbaccel." not in source.partition('"""')[2].partition('"""')[2]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
