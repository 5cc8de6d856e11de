"""What ranks write inside of a file shield is seen by all of them, and by nobody else."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from nbaccel.base.settings import RunSettings
from nbaccel.errors import LaunchRefused
from nbaccel.features.check.shield import file_shield
from nbaccel.features.check.shield.file_shield import FileShield
from nbaccel.features.check.shield.mount_table import mount_points, mount_tree
from nbaccel.launching.ipc.spec import Devices, FunctionTask, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.output.screens import ConsoleScreen

REPOSITORY = Path(__file__).resolve().parent.parent.parent

Run = Callable[..., list[Any]]


@pytest.fixture
def shield(tmp_path: Path) -> Iterator[FileShield]:
    folder = tmp_path / "the shield, of: a\\test"  # characters with a meaning in the options of a mount
    folder.mkdir()
    shield = FileShield.start([], folder)
    if not shield.entry:
        pytest.skip(f"no file can be shielded here: {shield.why_not}")
    yield shield
    shield.close()
    assert not folder.exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "a home, with: signs"
    home.mkdir()
    (home / "old.txt").write_text("old\n")
    (home / "folder").mkdir()
    (home / "folder" / "kept.txt").write_text("kept\n")
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def run(launcher: Launcher, shield: FileShield, start_method: str) -> Run:
    """Two ranks inside of the shield; returns what the function returns in each."""

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        return in_ranks(launcher, shield, start_method, function, *args)

    return run


@pytest.mark.parametrize("is_used", [True, False])
def test_a_driver_that_was_not_used_yet_is_used_outside_of_the_namespaces_first(
    is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA has the rest of it loaded by a program with the rights of root, which none has in a user namespace."""
    monkeypatch.setattr(file_shield, "lacks_device_file", lambda: not is_used)
    monkeypatch.setattr(file_shield, "_USE_CUDA", f"open({str(tmp_path / 'used')!r}, 'w'); 1 / 0")
    (tmp_path / "shield").mkdir()
    FileShield.start([], tmp_path / "shield").close()
    assert (tmp_path / "used").exists() is not is_used


def in_ranks(
    launcher: Launcher, shield: FileShield | None, start: str, function: Callable[..., Any], *args: Any
) -> list[Any]:
    spec = LaunchSpec(
        FunctionTask(function, args),
        Devices(2),
        Start(start, "a test"),
        RunSettings(cpu=True),
        parts=() if shield is None else (("nbaccel.features.check.shield.shielded:Shielded", shield.entry),),
        meeting_folder=None if shield is None else shield.meeting_folder,
    )
    run, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
    try:
        if run.error is not None:
            raise run.error
        return [ended.values(rank)["value"] for rank in range(2)]
    finally:
        ended.close()


def state_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def wait_for(path: str) -> None:
    while not os.path.exists(path):  # ended by the test's own timeout
        time.sleep(0.01)


def writes(home: str, beside: str) -> dict[str, Any]:
    """Write in many ways, on rank 0; rank 1 waits for the last file, and both return what they see."""
    if os.environ["RANK"] == "0":
        Path("relative.txt").write_text("new")
        Path(home, "absolute.txt").write_text("new")
        Path(beside).write_text("new")
        with open("old.txt", "a") as file:
            file.write("added\n")
        os.remove("folder/kept.txt")
        os.mkdir("made")
        os.rename("made", "moved")
        torch.save(torch.ones(2), "moved/model.pt")
        subprocess.run(["touch", "touched"], check=True)
        Path("done").touch()
    wait_for("done")
    seen = {name: Path(name).read_text() for name in ("relative.txt", "absolute.txt", "old.txt", beside)}
    return seen | {
        "here": os.getcwd(),
        "is_removed": not os.path.exists("folder/kept.txt"),
        "sum": float(torch.load("moved/model.pt").sum()),
        "is_touched": os.path.exists("touched"),
    }


def test_ranks_see_what_they_write_and_nothing_of_it_reaches_the_machine(run: Run, home: Path, tmp_path: Path) -> None:
    before = state_of(home)
    with tempfile.TemporaryDirectory() as other:
        beside = os.path.join(other, "beside.txt")
        expected = {
            **{"relative.txt": "new", "absolute.txt": "new", "old.txt": "old\nadded\n", beside: "new"},
            **{"here": str(home), "is_removed": True, "sum": 2.0, "is_touched": True},
        }
        assert run(writes, str(home), beside) == [expected, expected]
        assert os.listdir(other) == []
    assert state_of(home) == before
    assert sorted(os.listdir(home)) == ["folder", "old.txt"]


class WritesItems(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        Path(f"item{index}-{os.environ['RANK']}").touch()
        return index


def loads() -> list[str]:
    assert [int(batch) for batch in DataLoader(WritesItems(), num_workers=1)] == [0, 1]
    return sorted(name for name in os.listdir() if name.endswith(os.environ["RANK"]))


def test_the_workers_of_a_loader_are_in_the_shield_of_their_rank(run: Run, home: Path) -> None:
    assert run(loads) == [["item0-0", "item1-0"], ["item0-1", "item1-1"]]
    assert sorted(os.listdir(home)) == ["folder", "old.txt"]


def renames_a_folder() -> list[str]:
    if os.environ["RANK"] == "0":
        shutil.move("folder", "renamed")
        Path("done").touch()
    wait_for("done")
    return os.listdir("renamed")


def test_a_rank_enters_whose_fork_has_started_a_thread(launcher: Launcher, shield: FileShield, home: Path) -> None:
    """As OpenTelemetry does, which mlflow and others import."""
    is_on = [True]
    os.register_at_fork(
        after_in_child=lambda: is_on and threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    )
    try:
        assert in_ranks(launcher, shield, "fork", Path("new.txt").write_text, "new") == [3, 3]
    finally:
        is_on.clear()
    assert state_of(home) == {"old.txt": "old\n", "folder/kept.txt": "kept\n"}


def test_a_folder_that_existed_before_can_be_renamed(run: Run, home: Path) -> None:
    assert run(renames_a_folder) == [["kept.txt"]] * 2
    assert (home / "folder" / "kept.txt").exists()


def test_files_that_the_notebook_has_open_or_mapped_are_not_changed_by_forked_ranks(
    launcher: Launcher, shield: FileShield, home: Path
) -> None:
    log = open("log.txt", "w+")  # noqa: SIM115  # the notebook keeps it open
    log.write("from the notebook\n")
    (home / "mapped").write_bytes(b"0" * mmap.PAGESIZE)
    with open("mapped", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)

    here = os.open(home, os.O_RDONLY)

    def change() -> tuple[str, bytes]:
        log.write(f"from rank {os.environ['RANK']}\n")
        log.flush()
        mapped[:1] = b"1"
        os.close(os.open("below", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        return Path("log.txt").read_text(), Path("mapped").read_bytes()[:1]

    log.flush()
    seen = in_ranks(launcher, shield, "fork", change)
    assert [text.startswith("from the notebook\nfrom rank ") for text, _ in seen] == [True, True]
    assert [byte for _, byte in seen] == [b"1", b"1"]
    assert (home / "log.txt").read_text() == "from the notebook\n"
    assert mapped[:1] == b"0"
    assert not (home / "below").exists()
    log.close()
    mapped.close()
    os.close(here)


def test_files_with_an_odd_name_are_not_changed_by_forked_ranks(
    launcher: Launcher, shield: FileShield, home: Path
) -> None:
    """Linux calls a file that was removed "name (deleted)"."""
    name = "log (deleted)"
    log = open(name, "w+")  # noqa: SIM115  # the notebook keeps it open
    log.write("0" * mmap.PAGESIZE)
    log.flush()
    mapped = mmap.mmap(log.fileno(), 0)

    def change() -> str:
        mapped[:1] = b"1"
        log.write("more")
        log.flush()
        return Path(name).read_text()[:1]

    assert in_ranks(launcher, shield, "fork", change) == ["1", "1"]
    assert (home / name).read_text() == "0" * mmap.PAGESIZE
    mapped.close()
    log.close()


def test_a_file_of_the_notebook_that_cannot_be_copied_can_only_be_read(
    launcher: Launcher, shield: FileShield, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbaccel.features.check.shield.shielded._MOST_COPIED_BYTES", 1)
    log = open("old.txt", "r+")  # noqa: SIM115  # the notebook keeps it open

    def change() -> str:
        text = next(log)
        try:
            os.write(log.fileno(), b"more")
        except OSError as error:
            return f"{text}{error.strerror}"
        return "written"

    assert in_ranks(launcher, shield, "fork", change) == ["old\nBad file descriptor"] * 2
    assert (home / "old.txt").read_text() == "old\n"
    log.close()


def says_where_runs_meet() -> str:
    from nbaccel.base.world import run_folder

    return str(run_folder())


def test_the_folder_of_a_run_is_shared_with_the_kernel_and_goes_with_the_run(
    run: Run, shield: FileShield, home: Path
) -> None:
    folder, _ = run(says_where_runs_meet)
    assert Path(folder).parent == Path(shield.entry.split(" ", 2)[2])
    assert not Path(folder).exists()


def test_folders_of_the_kernels_own_are_shared_and_named(launcher: Launcher, tmp_path: Path, home: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "shield"
    own.mkdir()
    folder.mkdir()
    shield = FileShield.start([own], folder)
    if not shield.entry:
        pytest.skip(f"no file can be shielded here: {shield.why_not}")
    try:
        assert shield.not_covered == [own]
        assert (shield.covers(home), shield.covers(own / "x"), shield.covers("/dev/shm/x")) == (True, False, False)

        def note() -> None:
            Path(own, os.environ["RANK"]).touch()

        in_ranks(launcher, shield, "fork", note)
        assert sorted(os.listdir(own)) == ["0", "1"]
    finally:
        shield.close()


def test_a_rank_that_cannot_enter_runs_nothing_of_the_users(
    launcher: Launcher, shield: FileShield, home: Path, start_method: str
) -> None:
    shield.entry = shield.entry.replace("mnt:[", "mnt:[9")
    with pytest.raises(
        LaunchRefused, match=r"could not enter the file shield of its dry run \(its process has ended\)"
    ):
        in_ranks(launcher, shield, start_method, writes, str(home), str(home / "beside.txt"))
    assert sorted(os.listdir(home)) == ["folder", "old.txt"]


def modules_of_dry_runs() -> list[str]:
    names = ("shielded", "redirected_saves", "redirected_checkpoints", "kept_originals", "dry_run")
    return [module for module in sys.modules if module.startswith("nbaccel.") and module.endswith(names)]


def test_a_run_without_a_shield_loads_nothing_of_it(launcher: Launcher) -> None:
    assert in_ranks(launcher, None, "zygote", modules_of_dry_runs) == [[], []]


# -- programs with other rights

UNSHIELDED = """
import ctypes, json, os, subprocess, sys, traceback
from pathlib import Path
from nbaccel.features.check.shield.file_shield import FileShield
from nbaccel.features.check.shield.shielded import enter

def call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)

def private_mounts():
    call("unshare", 0x20000)
    call("mount", b"none", b"/", None, 1 << 14 | 1 << 18, None)

def shielded(home, function):
    '''Return the value of `function` in a child inside of a shield, or why there is none.'''
    folder = Path(home, "shield")
    folder.mkdir()
    shield = FileShield.start([], folder)
    try:
        if not shield.entry:
            return {"why_not": shield.why_not}
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                enter(shield.entry)
                os.write(write, json.dumps(function()).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        return json.loads(os.read(read, 1 << 16))
    finally:
        shield.close()
"""


def in_program(lines: str, *arguments: str) -> Any:
    """Return what a program prints, as JSON."""
    program = subprocess.run(
        [sys.executable, "-c", UNSHIELDED + lines, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give up rights, or mount file systems")


READ_ONLY = """
def attempt():
    errors = {}
    for folder in ("open", "closed"):
        try:
            Path(folder, "new").touch()
        except OSError as error:
            errors[folder] = error.strerror
    return errors

private_mounts()
os.chdir(sys.argv[1])
for folder in ("open", "closed"):
    os.mkdir(folder)
call("mount", b"tmpfs", b"closed", b"tmpfs", 0, b"size=1m")
call("mount", None, b"closed", None, 32 | 1, None)
print(json.dumps([shielded(sys.argv[1], attempt), os.listdir("open")]))
"""


def test_a_read_only_folder_stays_one(tmp_path: Path) -> None:
    needs_root()
    assert in_program(READ_ONLY, str(tmp_path)) == [{"closed": "Read-only file system"}, []]


ONLY_READ_ONLY = """
private_mounts()
call("mount", b"/", b"/mnt", None, 1 << 12 | 1 << 14, None)
os.chroot("/mnt")
for line in reversed(open("/proc/self/mountinfo").read().splitlines()):
    point = line.split()[4].encode().decode("unicode_escape")
    kind = line.partition(" - ")[2].split()[0]
    if kind not in ("proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2") and not point.startswith("/dev"):
        call("mount", None, os.fsencode(point), None, 4096 | 32 | 1, None)
call("mount", b"tmpfs", b"/run", b"tmpfs", 0, b"size=1m")
os.mkdir("/run/home")
print(json.dumps(shielded("/run/home", lambda: None)))
"""


def test_where_no_file_system_can_be_written_to_there_is_no_shield() -> None:
    needs_root()
    assert in_program(ONLY_READ_ONLY) == {"why_not": "no local file system can be written to"}


ON_AN_OVERLAY = """
private_mounts()
os.chdir(sys.argv[1])
for folder in ("lower", "upper", "work", "disk", "lower/home"):
    os.mkdir(folder)
call("mount", b"overlay", b"disk", b"overlay", 0, b"lowerdir=lower,upperdir=upper,workdir=work")
folder = Path("disk", "shield")
folder.mkdir()
shield = FileShield.start([], folder)
if os.fork() == 0:
    enter(shield.entry)
    Path("disk", "home", "new").write_text("x" * 1000)
    os._exit(0)
os.wait()
is_in_memory = shield.room_bytes != shield.free_bytes(folder)
print(json.dumps([shield.why_not, is_in_memory, shield.covers("disk/home"), os.listdir("disk/home")]))
shield.close()
"""


def test_where_no_disk_takes_what_is_written_it_lies_in_memory(tmp_path: Path) -> None:
    needs_root()
    assert in_program(ON_AN_OVERLAY, str(tmp_path)) == ["", True, True, []]


WITHOUT_A_RIGHT = """
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

def give_up_mounting():
    words = (ctypes.c_uint32 * 6)()
    call("capget", ctypes.byref(Header(0x20080522, 0)), words)
    words[0] &= ~(1 << 21)
    words[1] &= ~(1 << 21)
    call("prctl", 24, 21, 0, 0, 0)
    call("capset", ctypes.byref(Header(0x20080522, 0)), words)
"""

AS_IN_A_CONTAINER = (
    WITHOUT_A_RIGHT
    + """
def attempt():
    seen = state()
    Path("new").touch()
    Path("disk", "new").touch()
    os.chown("theirs", 12345, 12345)
    with open("theirs", "a") as file:
        file.write("more")
    return [Path("theirs").read_text(), os.stat("theirs").st_uid, seen]

def state():
    rights = [line for line in open("/proc/self/status") if line.startswith("CapEff")]
    known = {path: os.stat(path) for path in ("/", "theirs", "disk", *(f"/{name}" for name in os.listdir("/")))}
    return [rights, {path: [one.st_uid, one.st_gid, one.st_mode] for path, one in known.items()}]

os.chdir(sys.argv[1])
Path("theirs").write_text("text")
os.chown("theirs", 12346, 12346)
os.mkdir("disk")
private_mounts()
call("mount", b"tmpfs", b"disk", b"tmpfs", 0, b"size=1m,uid=12346,gid=12346,mode=2750")
give_up_mounting()
before = state()
answer = shielded(sys.argv[1], attempt)
print(json.dumps([answer, before, sorted(str(path) for path in Path().rglob("*")), os.stat("theirs").st_uid]))
"""
)


def test_root_that_may_not_mount_gets_a_user_namespace_with_all_users_and_no_more_rights(tmp_path: Path) -> None:
    needs_root()
    answer, state, names, owner = in_program(AS_IN_A_CONTAINER, str(tmp_path))
    if "why_not" in answer:
        pytest.skip(answer["why_not"])
    assert answer == ["textmore", 12345, state]
    assert (names, owner) == (["disk", "theirs"], 12346)


AS_A_USER = """
private_mounts()
home = sys.argv[1]
# What the user needs, Python itself too, may lie below a folder that only root may enter.
kept = {}
for folder in map(Path, sys.argv[1:]):
    closed = [path for path in reversed([folder, *folder.parents]) if not path.stat().st_mode & 1]
    if closed:
        kept[folder] = closed[0], os.open(folder, os.O_PATH)
for path in {path for path, _ in kept.values()}:
    call("mount", b"tmpfs", bytes(path), b"tmpfs", 0, b"mode=755")
for folder, (_, fd) in kept.items():
    folder.mkdir(parents=True, exist_ok=True)
    call("mount", f"/proc/self/fd/{fd}".encode(), bytes(folder), None, 1 << 12 | 1 << 14, None)

# A mount below the home: Linux hides what is under it from user namespaces.
os.makedirs(home + "/disk")
call("mount", b"tmpfs", os.fsencode(home + "/disk"), b"tmpfs", 0, b"mode=777")
Path(home, "old.txt").write_text("old")
Path(home, "of_root").mkdir()
os.makedirs(home + "/of_root/mine")
os.makedirs(home + "/mine/old")
Path(home, "mine/old/kept").write_text("kept")
Path(home, "mine/old/too").write_text("too")
mine = ("", "/old.txt", "/of_root/mine", "/mine", "/mine/old", "/mine/old/kept", "/mine/old/too")
for path in (home + name for name in mine):
    os.chown(path, 12345, 12345)
os.setgroups([])
os.setgid(12345)
os.setuid(12345)
os.environ["HOME"] = home
os.chdir(home)

def attempt():
    errors = {}
    for path in ("new", "old.txt", "disk/new", "of_root/mine/new", "of_root/new", "/new", "/tmp/nbaccel-new"):
        try:
            with open(path, "a") as file:
                file.write("x")
        except OSError as error:
            errors[path] = error.strerror
    text = Path("old.txt").read_text()
    os.rename("mine/old", "mine/renamed")
    os.replace("mine/renamed/kept", "of_root/mine/kept")
    os.remove("old.txt")
    try:
        os.rename("of_root/mine/kept", "disk/kept")
    except OSError as error:
        errors["from disk to disk"] = error.strerror
    kept = Path("of_root/mine/kept").read_text()
    return [errors, text, os.getuid(), kept, os.listdir("mine/renamed"), os.listdir("mine"), os.path.exists("old.txt")]

answer = shielded(home, attempt)
found = sorted(str(path.relative_to(home)) for path in Path(home).rglob("*"))
print(json.dumps([answer, found, Path("old.txt").read_text(), os.path.exists("/tmp/nbaccel-new")]))
"""


def test_a_user_without_rights_is_shielded_by_a_user_namespace(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders of others that the user may not write to stay closed, though the namespace shows them as its own."""
    needs_root()
    with tempfile.TemporaryDirectory() as folder:
        home = os.path.join(folder, "home")
        os.mkdir(home)
        readable = {sys.base_prefix, sys.prefix, str(REPOSITORY)}
        answer, names, text, has_reached = in_program(AS_A_USER, home, *readable)
    if "why_not" in answer:
        pytest.skip(answer["why_not"])
    refused = {"of_root/new": "Permission denied", "/new": "Permission denied"}
    refused["from disk to disk"] = "Invalid cross-device link"
    assert answer == [refused, "oldx", 12345, "kept", ["too"], ["renamed"], False]
    before = ["disk", "mine", "mine/old", "mine/old/kept", "mine/old/too", "of_root", "of_root/mine", "old.txt"]
    assert (names, text, has_reached) == (before, "old", False)


REFUSED = (
    WITHOUT_A_RIGHT
    + """
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.POINTER(Filter))]

number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
filters = (Filter * 4)(
    Filter(0x20, 0, 0, 0),  # load the number of the call
    Filter(0x15, 0, 1, number),
    Filter(0x06, 0, 0, 0x50000 | 1),  # EPERM
    Filter(0x06, 0, 0, 0x7FFF0000),
)
if sys.argv[2] == "user":
    give_up_mounting()
call("prctl", 38, 1, 0, 0, 0)  # no new privileges
call("prctl", 22, 2, ctypes.byref(Program(4, filters)), 0, 0)  # a filter, as containers have one
print(json.dumps([shielded(sys.argv[1], lambda: None), os.listdir(sys.argv[1])]))
"""
)


@pytest.mark.parametrize("kind", ["user", "mount"])
def test_where_namespaces_are_forbidden_the_kernel_knows_why_there_is_no_shield(tmp_path: Path, kind: str) -> None:
    needs_root()
    reason = f"this machine allows no {kind} namespaces (EPERM)"
    assert in_program(REFUSED, str(tmp_path), kind) == [{"why_not": reason}, []]


@pytest.mark.parametrize("does", ["sys.exit('no room')", "print('no JSON')"])
def test_a_holder_that_ends_at_once_is_no_shield(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    program = f"import sys; {does} # {{path}} {{order}}"
    monkeypatch.setattr("nbaccel.features.check.shield.file_shield._BOOTSTRAP", program)
    folder = tmp_path / "shield"
    folder.mkdir()
    shield = FileShield.start([], folder)
    message = "1: no room" if "room" in does else "0: no message"
    assert (shield.entry, shield.why_not) == ("", f"its process ended with exit code {message}")
    assert not shield.covers(tmp_path)
    shield.close()
    assert not folder.exists()


KILLED = """
folder = Path(sys.argv[1], "shield")
folder.mkdir()
shield = FileShield.start([], folder)
print(json.dumps(shield.entry), flush=True)
Path(folder, "layers").stat()
sys.stdin.read()
"""


def test_a_killed_kernel_leaves_no_holder_and_no_folder(tmp_path: Path) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", UNSHIELDED + KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with kernel:
        assert kernel.stdout is not None
        entry = json.loads(kernel.stdout.readline())
        if not entry:
            kernel.kill()
            pytest.skip("no file can be shielded here")
        holder = Path(entry.split("/ns ")[0])
        assert holder.exists()
        kernel.kill()
    while holder.exists() or list(tmp_path.iterdir()):
        time.sleep(0.01)  # ended by the test's own timeout; a tenth of a second otherwise


# -- the table of mounts


def test_hidden_mounts_are_left_out_and_signs_in_paths_are_read() -> None:
    text = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:5 / /proc rw - proc proc rw
31 22 8:2 / /home/below rw - ext4 /dev/sdb1 rw
32 22 8:3 / /home rw,noexec - xfs /dev/sdc1 rw
33 32 0:9 / /home/my\\040data rw - nfs4 server:/ rw
34 32 8:4 / /home/once rw - ext4 /dev/sdd1 rw
35 34 8:5 / /home/once ro - ext4 /dev/sde1 ro
36 22 0:6 / /tmp rw - tmpfs tmpfs rw
37 22 8:6 / /a\r\x0cb\x85c rw - nfs server:/ rw
"""
    root = mount_tree(text)
    assert root is not None
    seen = [root, *root.below()]
    points = ["/", "/proc", "/home", "/home/my data", "/home/once", "/tmp", "/a\r\x0cb\x85c"]
    assert [mount.point for mount in seen] == points
    assert [mount.point for mount in seen if mount.is_shielded] == ["/", "/home", "/tmp"]
    assert [mount.point for mount in seen if mount.is_open] == ["/home/my data", "/a\r\x0cb\x85c"]
    assert mount_points(text)[4:7] == ["/home/my data", "/home/once", "/home/once"]
    assert mount_tree("22 1 8:1 / /elsewhere rw - ext4 /dev/sda1 rw\n") is None


def test_free_bytes_are_those_of_the_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = FileShield.free_bytes(tmp_path / "none" / "yet")
    assert abs(free - disk.f_bavail * disk.f_frsize) < 1 << 30
