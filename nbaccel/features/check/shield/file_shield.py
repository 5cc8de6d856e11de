"""File shield of a dry run: ranks that enter it write no file of the machine. Runs in the kernel.

`FileShield` starts the process that holds the namespaces (`shield_holder`), and says why there is none where Linux, a
container or a system administrator forbids them. Ranks enter by `shield/shielded.py`. Where there is no shield,
`FolderSnapshot` finds the files that have changed.

Not shielded: network file systems, and what is no file of a disk: databases, sockets, /dev/shm, /run. Limits of user
namespaces are in `shield_holder`.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbaccel.base.gpu_driver import lacks_device_file
from nbaccel.base.hardware import usable_memory
from nbaccel.features.check.shield.mount_table import is_covered

__all__ = [
    "FileShield",
]

# Python puts the working folder first, in which a file of the user may be called json.py.
_MAIN = "nbaccel.features.check.shield.shield_holder"
_BOOTSTRAP = "import sys; sys.path[:1] = [{path!r}]; from " + _MAIN + " import main; main({order!r})"
# CUDA has a program with the rights of root load the rest of the driver when it is used for the first time since the
# machine was started. In a user namespace that program has no such rights.
_USE_CUDA = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
_USE_S = 20.0
_ABOVE_PACKAGE = str(Path(__file__).resolve().parents[4])
_ANSWER_S = 20.0
_END_S = 10.0


class FileShield:
    """Namespaces in which ranks may write to every local file system, and nothing of it reaches the machine.

    Start and close take about 60 ms each, on two cores. A second run sees what the first one wrote.

    entry: the argument of the rank part `Shielded`; empty if there is no shield.
    meeting_folder: for the `LaunchSpec`, so that kernel and ranks see the same one; None if there is no shield.
    why_not: the reason for that, as half a sentence.
    not_covered: folders that can be written to and are not shielded, such as network file systems.
    room_bytes: for all that ranks write, on the disk of `folder`, or in memory if no disk takes it; 0 without a shield.
    """

    def __init__(self, holder: subprocess.Popen[bytes] | None, folder: Path, answer: dict[str, Any]) -> None:
        self._holder, self._folder, self._answer = holder, folder, answer
        self.why_not: str = answer["why_not"]
        self.entry = ""
        self.meeting_folder: str | None = None
        if not self.why_not:
            self.entry = f"/proc/{answer['pid']}/ns {answer['namespace']} {_meeting_folder(folder)}"
            self.meeting_folder = str(_meeting_folder(folder))
        self.not_covered = [Path(path) for path in answer.get("open", ()) if path != str(_meeting_folder(folder))]
        self.room_bytes: int = 0 if self.why_not else answer["memory_bytes"] or self.free_bytes(folder)

    @classmethod
    def start(cls, own: Sequence[Path], folder: Path) -> FileShield:
        """Start it, in an empty `folder` of its own, on a local disk if there is one; what ranks write lies there.

        own: folders that ranks and the kernel share: what ranks write there reaches the machine. They exist already.
        """
        folder = folder.resolve()
        _meeting_folder(folder).mkdir(mode=0o700)
        if lacks_device_file():
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([sys.executable, "-S", "-E", "-c", _USE_CUDA], timeout=_USE_S, capture_output=True)
        shared = [_meeting_folder(folder), *(path.resolve() for path in own)]
        order = {
            "folder": str(folder),
            "shared": [str(path) for path in shared],
            "memory_bytes": usable_memory().available_bytes // 2,
            "kernel": os.getpid(),
        }
        try:
            holder = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _BOOTSTRAP.format(path=_ABOVE_PACKAGE, order=order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return cls(None, folder, {"why_not": f"its process could not be started ({error.strerror})"})
        try:
            return cls(holder, folder, _answer_of(holder))
        except BaseException:  # an interrupt
            cls(holder, folder, {"why_not": "interrupted"}).close()
            raise

    def covers(self, path: str | os.PathLike[str]) -> bool:
        """Return whether what a rank writes at `path` is discarded; without a shield, nothing is."""
        uncovered = [*self._answer.get("open", ()), *self._answer.get("of_the_system", ())]
        return not self.why_not and is_covered(os.path.realpath(path), self._answer["covered"], uncovered)

    @staticmethod
    def free_bytes(path: str | os.PathLike[str]) -> int:
        """Return the free bytes of the disk of `path`, which may not exist yet: the real ones, for this user."""
        place = Path(path).absolute()
        disk = os.statvfs(next(folder for folder in (place, *place.parents) if folder.exists()))
        return disk.f_bavail * disk.f_frsize

    def close(self) -> None:
        """End the holder, and remove all that ranks have written; ranks that are inside have ended before."""
        holder, self._holder = self._holder, None
        if holder is not None:
            with holder:  # closes its pipes, and waits
                assert holder.stdin is not None
                with suppress(OSError):  # it has ended
                    os.write(holder.stdin.fileno(), b"\n")  # its end of the pipe stays open in forks of this process
                with suppress(subprocess.TimeoutExpired):
                    holder.wait(_END_S)
                if holder.poll() is None:
                    holder.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _meeting_folder(folder: Path) -> Path:
    """Return the folder in which runs have their own: kernel and ranks both see it."""
    return folder / "runs"


def _answer_of(holder: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert holder.stdout is not None
    poll = select.poll()  # a notebook may have more files open than `select.select` takes
    poll.register(holder.stdout, select.POLLIN)
    if not poll.poll(_ANSWER_S * 1000):
        return {"why_not": f"no namespace was ready in {_ANSWER_S:.0f} s"}
    try:
        answer: dict[str, Any] = json.loads(holder.stdout.readline())
    except ValueError:
        assert holder.stderr is not None
        said = holder.stderr.read().decode(errors="replace").strip().splitlines()
        return {"why_not": f"its process ended with exit code {holder.wait()}: {said[-1] if said else 'no message'}"}
    return answer
