"""The holder of a file shield: a process in whose mount namespace all that is written is discarded. Standard library.

`FileShield` starts it without site-packages, and it reports to the kernel in one line of JSON. There are two processes.
The outer one stays in the machine's own namespaces: it maps the users of the new ones, ends with the kernel, and
removes the layers. The inner one is in the new namespaces, which ranks enter by its number.

The new root is made of the mounts of this process. A writable local file system is the lower layer of an overlay, whose
upper layer lies in the folder of the shield, or in memory where its file system cannot be one. Everything else is bound
as it is: read-only and network file systems, /proc, /sys, /dev and /run.

In a user namespace, Linux does not show what lies below a mount. A folder with mounts below it can be no lower layer
there, and is built entry by entry. Where only one user is mapped, files of other users or groups cannot be changed even
if their mode allows it (EOVERFLOW), and folders that existed before cannot be renamed (EXDEV).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any

from nbaccel.features.check.shield.mount_table import (
    OF_THE_SYSTEM,
    SERVICES,
    SeenMount,
    call_libc,
    is_covered,
    is_in,
    mount_tree,
    read_mounts,
)

__all__ = ["main"]

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_CAP_SYS_ADMIN = 21
_MOST_COPIED_BYTES = 64 << 20
_MOST_FOLDERS, _DEEPEST = 3_000, 5
"""Limits of the search for folders that this user may write to, below folders of others."""

_OF_ROOT = (
    "/boot",
    "/etc",
    "/lib",
    "/lib64",
    "/lost+found",
    "/sbin",
    "/usr/include",
    "/usr/lib",
    "/usr/share",
    "/usr/src",
)
"""Folders that are not searched: what lies in them belongs to root."""

_REMOVE_S = 5.0


class _NewRoot:
    """The root folder that ranks see. Built in the new namespaces, where nothing can be mounted for others.

    folder: of the shield.  shared: folders that stay the machine's own.  memory_bytes: limit of layers in memory.
    is_alone: in a new user namespace.  maps_one: only this user is mapped there.
    """

    def __init__(self, folder: str, shared: Sequence[str], memory_bytes: int, is_alone: bool, maps_one: bool) -> None:
        self.top = os.path.join(folder, "root")
        self.covered: list[str] = []
        self.open: list[str] = []
        self.overlays = 0
        self.error = ""
        self._folder, self._shared, self._memory_bytes = folder, shared, memory_bytes
        self._is_alone, self._maps_one = is_alone, maps_one
        self._layers, self._memory = os.path.join(folder, "layers"), ""
        self._count = 0
        self._to_copy_bytes = _MOST_COPIED_BYTES
        self._folders_left = _MOST_FOLDERS

    @property
    def is_in_memory(self) -> bool:
        """Return whether overlays have their layers in memory."""
        return bool(self._memory)

    def build(self, root: SeenMount) -> None:
        """Build it, and make it the root of this process."""
        for folder in (self.top, self._layers):
            os.mkdir(folder)
        self._put(root)
        mounted = {mount.point for mount in root.below()}
        for path in (*(path for path in SERVICES if os.path.exists(path) and path not in mounted), *self._shared):
            self._bind(path)
        self.open += self._shared
        os.chdir(self.top)
        try:
            call_libc("pivot_root", b".", b".")
            call_libc("umount2", b".", _MNT_DETACH)
        except OSError:  # the root is that of an initial RAM disk
            os.chroot(self.top)
        os.chdir("/")

    def _put(self, mount: SeenMount) -> None:
        """Put `mount` with all on top of it into the new root."""
        if not mount.is_shielded:
            self._bind(mount.point)
            self.open += [mount.point] * mount.is_open
            for other in mount.on_top:
                self._put_if_shielded(other)
        elif not os.path.isdir(mount.point):
            self._count += 1
            copy = os.path.join(self._layers, f"{self._count}-file")
            is_copied = self._copied(mount.point, copy)
            self._bind(copy if is_copied else mount.point, mount.point)
            if not is_copied:
                self._close(mount, mount.point)
        elif self._is_alone and mount.on_top:
            call_libc("mount", b"tmpfs", os.fsencode(self._place(mount.point)), b"tmpfs", 0, b"mode=755")
            self._rebuild(mount, mount.point)
        else:
            self._cover(mount, mount.point)
            for other in mount.on_top:
                self._put(other)

    def _put_if_shielded(self, mount: SeenMount) -> None:
        """Cover `mount`, which was bound with the one below it, and what lies on top of it."""
        if mount.is_shielded:
            self._put(mount)
            return
        self.open += [mount.point] * mount.is_open
        for other in mount.on_top:
            self._put_if_shielded(other)

    def _rebuild(self, mount: SeenMount, folder: str) -> None:
        """Fill the place of `folder`, a part of `mount` with other mounts below it, entry by entry."""
        self.covered.append(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    self._put_entry(mount, entry)
        self._take_mode(folder, self._place(folder))

    def _put_entry(self, mount: SeenMount, entry: os.DirEntry[str]) -> None:
        path, place = entry.path, self._place(entry.path)
        if entry.is_symlink():
            os.symlink(os.readlink(path), place)
            return
        if entry.is_dir():
            os.mkdir(place)
        else:
            _touch(place)
        if (on_top := next((other for other in mount.on_top if other.point == path), None)) is not None:
            self._put(on_top)
        elif not entry.is_dir():
            if not self._copied(path, place):
                self._bind(path)
                self._close(mount, path)
        elif any(is_in(other.point, (path,)) for other in mount.on_top):
            self._rebuild(mount, path)
        else:
            self._cover(mount, path)

    def _cover(self, mount: SeenMount, folder: str) -> None:
        """Put an overlay of `folder`, a part of `mount`, into its place; where that fails, the folder itself."""
        try:
            self._overlay(mount, folder)
            self.covered.append(folder)
        except OSError as error:
            self.error = self.error or f"{errno.errorcode.get(error.errno or 0, error.errno)} at {folder}"
            self._bind(folder)
            if os.access(folder, os.W_OK):
                self.open.append(folder)

    def _overlay(self, mount: SeenMount, folder: str) -> None:
        try:
            self._mount_overlay(folder, mount.flags, self._layers)
        except OSError:
            if self._layers == self._memory:
                raise
            self._memory = self._memory or self._in_memory()
            self._mount_overlay(folder, mount.flags, self._memory)
            if not self.overlays:
                self._layers = self._memory
        self.overlays += 1

    def _mount_overlay(self, folder: str, flags: int, layers: str) -> None:
        self._count += 1
        upper, work = (os.path.join(layers, f"{self._count}-{name}") for name in ("upper", "work"))
        os.mkdir(upper)
        os.mkdir(work)
        self._take_mode(folder, upper)
        if self._maps_one:
            self._make_reachable(folder, upper)
        # By descriptors, since the characters , : and \ of a path have a meaning in these options.
        fds = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (folder, upper, work)]
        names = ("lowerdir", "upperdir", "workdir")
        parts = [f"{name}=/proc/self/fd/{fd}" for name, fd in zip(names, fds, strict=True)]
        options = [*parts, "index=off", "userxattr" if self._is_alone else "redirect_dir=on"]
        try:
            call_libc(
                "mount", b"overlay", os.fsencode(self._place(folder)), b"overlay", flags, ",".join(options).encode()
            )
        finally:
            for fd in fds:
                os.close(fd)

    def _in_memory(self) -> str:
        """Return a folder in memory for layers, made now."""
        place = os.path.join(self._folder, "memory")
        os.mkdir(place)
        call_libc("mount", b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={self._memory_bytes}".encode())
        return place

    def _make_reachable(self, folder: str, upper: str) -> None:
        """Make in `upper` the folders of others that this user may write to, or in which folders of this user lie.

        Linux would have to copy them when something below them is written, and their owner does not exist there.
        """
        home, here = os.path.expanduser("~"), os.getcwd()
        self._look_below(folder, upper, folder.rstrip("/").count("/"))
        for path in (home, here, self._folder, *self._shared):
            if path != folder and is_in(path, (folder,)):
                self._make_chain(folder, upper, path)

    def _look_below(self, folder: str, upper: str, depth: int) -> bool:
        """Return whether the folder of others at `folder` has to be in `upper`, and make it there."""
        is_wanted = os.access(folder, os.W_OK | os.X_OK)
        if folder in _OF_ROOT:
            return is_wanted
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if self._folders_left <= 0 or not entry.is_dir(follow_symlinks=False):
                    continue
                self._folders_left -= 1
                if _is_mine(entry.stat(follow_symlinks=False)):
                    is_wanted = True
                elif depth < _DEEPEST:
                    is_wanted |= self._look_below(entry.path, os.path.join(upper, entry.name), depth + 1)
        if is_wanted:
            os.makedirs(upper, exist_ok=True)
            self._take_mode(folder, upper)
        return is_wanted

    def _make_chain(self, folder: str, upper: str, path: str) -> None:
        for name in os.path.relpath(path, folder).split("/"):
            folder, upper = os.path.join(folder, name), os.path.join(upper, name)
            if os.path.isdir(folder):
                os.makedirs(upper, exist_ok=True)
                self._take_mode(folder, upper)

    def _take_mode(self, folder: str, copy: str) -> None:
        """Let this user do in `copy` what it may do in `folder`."""
        known = os.stat(folder)
        if not self._maps_one:
            os.chown(copy, known.st_uid, known.st_gid)
            os.chmod(copy, stat.S_IMODE(known.st_mode))
            return
        mode = stat.S_IMODE(known.st_mode) | 0o500
        may_write = os.access(folder, os.W_OK)
        os.chmod(copy, mode | 0o200 if may_write else mode & ~0o222)

    def _copied(self, path: str, copy: str) -> bool:
        """Copy a file that this user may write to; return False for a large one, or if it may not."""
        known = os.stat(path)
        is_written = stat.S_ISREG(known.st_mode) and os.access(path, os.W_OK)
        if not is_written or known.st_size > self._to_copy_bytes:
            return False
        self._to_copy_bytes -= known.st_size
        shutil.copy2(path, copy)
        if not self._maps_one:
            os.chown(copy, known.st_uid, known.st_gid)
        return True

    def _close(self, mount: SeenMount, path: str) -> None:
        """Make a file that was bound as it is, a part of `mount`, read-only; sockets and the like stay open."""
        if stat.S_ISREG(os.stat(path).st_mode):
            flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | mount.flags
            call_libc("mount", None, os.fsencode(self._place(path)), None, flags, None)

    def _bind(self, path: str, over: str = "") -> None:
        """Show `path` as it is, in the place of `over`, by default its own."""
        place = os.fsencode(self._place(over or path))
        call_libc("mount", os.fsencode(path), place, None, _MS_BIND | _MS_REC, None)

    def _place(self, path: str) -> str:
        return self.top if path == "/" else self.top + path


def _is_mine(known: os.stat_result) -> bool:
    return known.st_uid == os.geteuid() and known.st_gid == os.getegid()


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


class _Refused(Exception):
    """The reason why there is no shield, as half a sentence."""


class _Inner:
    """The process in the new namespaces: a fork of the outer one.

    order: of the kernel.  line: the connection to the outer process.  is_alone: in a new user namespace.
    """

    def __init__(self, order: dict[str, Any], line: socket.socket, is_alone: bool) -> None:
        self._order, self._line, self._is_alone = order, line, is_alone

    def live(self) -> None:
        """Enter new namespaces, build the root, say how it went, and stay until the outer process has ended."""
        try:
            answer = self._answer()
        except _Refused as reason:
            answer = {"why_not": str(reason)}
        self._line.sendall(json.dumps(answer).encode() + b"\n")
        while self._line.recv(1):
            pass

    def _answer(self) -> dict[str, Any]:
        try:
            call_libc("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if self._is_alone else 0))
        except OSError as error:
            raise _no_namespaces(error, self._is_alone) from None
        self._line.sendall(b"\n")
        maps_one = self._line.recv(1) == b"1"
        root = mount_tree(read_mounts())
        if root is None:
            raise _Refused("the root folder of this process is no mount")
        folder = self._order["folder"]
        new = _NewRoot(folder, self._order["shared"], self._order["memory_bytes"], self._is_alone, maps_one)
        try:
            call_libc("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
            new.build(root)
        except OSError as error:
            raise _Refused(f"nothing can be mounted in a namespace here ({_name(error)})") from None
        if not new.overlays:
            raise _Refused(
                f"this machine allows no overlays ({new.error})"
                if new.error
                else "no local file system can be written to"
            )
        of_the_system = [*OF_THE_SYSTEM, *SERVICES]
        limit = self._order["memory_bytes"] if new.is_in_memory else 0
        answer: dict[str, Any] = {
            "why_not": "",
            "covered": new.covered,
            "open": new.open,
            "of_the_system": of_the_system,
        }
        answer |= {"memory_bytes": limit}
        if is_covered(folder, new.covered, [*new.open, *of_the_system]):
            try:
                _touch(os.path.join(folder, _PROBE))
            except OSError as error:
                raise _Refused(f"nothing can be written through overlays here ({_name(error)})") from None
        return answer


_PROBE = "written-in-the-namespace"
"""Name of a file that the inner process writes, and the outer one must not see."""


def _no_namespaces(error: OSError, is_alone: bool) -> _Refused:
    return _Refused(f"this machine allows no {'user' if is_alone else 'mount'} namespaces ({_name(error)})")


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def _may_mount() -> bool:
    """Return whether this process may mount file systems without a user namespace of its own."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = dict(line.split(":", 1) for line in file if ":" in line)
    return bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1)


def _map_users(pid: int) -> bool:
    """Give the user namespace of `pid` all users of this one, or this user alone; return whether it is alone."""
    try:
        for kind in ("gid", "uid"):
            with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
                parts = [line.split() for line in file]
            _write(f"/proc/{pid}/{kind}_map", "".join(f"{inside} {inside} {count}\n" for inside, _, count in parts))
    except PermissionError:
        if os.geteuid() == _overflow_user():
            raise _Refused("the user nobody cannot be told from other users in a user namespace") from None
        with contextlib.suppress(OSError):  # both are written already, where only the other kind was refused
            _write(f"/proc/{pid}/setgroups", "deny")
        for kind, number in (("uid", os.geteuid()), ("gid", os.getegid())):
            if not _read(f"/proc/{pid}/{kind}_map"):
                _write(f"/proc/{pid}/{kind}_map", f"{number} {number} 1\n")
        return True
    return False


def _overflow_user() -> int:
    return int(_read("/proc/sys/kernel/overflowuid") or 65534)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _write(path: str, text: str) -> None:
    """Write `text` in one call, as the files of user namespaces want it."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _start(order: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the answer to the kernel, and the number of the inner process."""
    is_alone = not _may_mount()
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        mine.close()
        try:
            _Inner(order, theirs, is_alone).live()
        finally:
            os._exit(0)
    theirs.close()
    lines = mine.makefile("rb")
    line = lines.readline()
    try:
        if line == b"\n":
            maps_one = is_alone and _map_users(pid)
            mine.sendall(b"1" if maps_one else b"0")
            line = lines.readline()
        answer = json.loads(line) if line else {"why_not": "the process in the new namespaces ended"}
    except OSError as error:
        answer = {"why_not": str(_no_namespaces(error, is_alone))}
    except _Refused as reason:
        answer = {"why_not": str(reason)}
    if os.path.exists(os.path.join(order["folder"], _PROBE)):
        answer = {"why_not": "files that are written in its namespaces reach the disk"}
    if not answer["why_not"]:
        answer |= {"pid": pid, "namespace": os.readlink(f"/proc/{pid}/ns/mnt")}
    mine.detach()  # open until this process ends: the inner one ends with it
    return answer, pid


def _remove(folder: str) -> None:
    """Remove `folder`; ranks that are about to end may still write there."""
    deadline = time.monotonic() + _REMOVE_S
    while os.path.exists(folder) and time.monotonic() < deadline:
        for path, names, _ in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):  # Linux makes folders for itself that even their owner cannot list
                    below = os.path.join(path, name)
                    if not os.path.islink(below):
                        os.chmod(below, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):
            time.sleep(0.05)


def main(order: dict[str, Any]) -> None:
    """Hold the shield until the kernel writes to this process, closes its end, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kernel = os.pidfd_open(os.getppid())
    inner = 0
    try:
        if os.getppid() == order["kernel"]:
            answer, inner = _start(order)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            if not answer["why_not"]:
                select.select([kernel, 0], [], [])
    finally:
        if inner:
            os.kill(inner, signal.SIGKILL)
            os.waitpid(inner, 0)
        _remove(order["folder"])
