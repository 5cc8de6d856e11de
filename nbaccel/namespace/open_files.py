"""Open files of the notebook: those that forked ranks would read from one place, and the place where rank 0 ends.

A fork inherits the *open file description*, with the one position of kernel and ranks: a `seek` of one rank moves the
next `read` of another, https://github.com/numpy/numpy/issues/18124. So `FilesOfRanks` finds, in the kernel, the
descriptors that are open for reading alone, and opens each anew for every rank, at the same position; the rank puts it
into the place of the inherited one, so that whatever reads through it stays as it is: a `ZipFile`, a `csv.reader`, a
picture that is not loaded yet. Nothing is opened if no name of the cell can lead to a file. Files that are open for
writing keep their one position, since ranks would overwrite each other's lines; what writes to them is watched by
`launching/libraries/one_file.py`. Pipes, sockets, devices and shared memory are left alone.

`ReadFile` is the `Kind` of files that are open for reading: the notebook's file is afterwards where rank 0's is.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import logging
import lzma
import os
import stat
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from nbaccel.base.notices import is_users
from nbaccel.errors import LaunchRefused
from nbaccel.namespace.kind import CannotWrite, Kind, Step, Write
from nbaccel.namespace.objects_behind import ObjectsBehind, package_of

__all__ = [
    "LOG_FOLDER",
    "READ_FILE",
    "FilesOfRanks",
    "kind_of_file",
    "regular_files",
    "take_places",
]

_NOT_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:")
_DELETED = " (deleted)"
_OF_IPYTHON = "history.sqlite"
LOG_FOLDER = "nbaccel-logs-"
"""Begin of the name of the temporary folder in which a kernel keeps the logs of its runs."""

# https://github.com/matplotlib/matplotlib/pull/14535: a fork drops them.
_FONTS = f"{os.sep}mpl-data{os.sep}fonts{os.sep}"
"""In the path of a font of matplotlib's, which holds those that it has drawn with open."""

_WITHOUT_DESCRIPTORS = frozenset({"nbaccel", "numpy", "torch", *sys.stdlib_module_names})
"""Packages whose C code holds no descriptor that its objects do not show; what others hold is not known."""

_MOVES = frozenset({"seek", "truncate"})
_READS = frozenset({"read", "read1", "readinto", "readline", "readlines"})


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """An open regular file of this process.

    Args:
        number: The number of its descriptor.
        is_read: Whether it is open for reading alone.
    """

    number: int
    path: str
    is_read: bool


@dataclass(frozen=True, slots=True)
class FilesOfRanks:
    """The open files that ranks of one start inherit.

    Args:
        read: Files that each rank gets anew.
        written: Python's files that are open for writing, to which names of the cell, or handlers of `logging`, lead.
    """

    read: Sequence[_Descriptor] = ()
    written: Sequence[Any] = ()

    @classmethod
    def behind(
        cls,
        values: Callable[[], Mapping[str, Any]],
        codes: Sequence[types.CodeType],
        ranks: int,
        *,
        all_are_wanted: bool = False,
    ) -> FilesOfRanks:
        """Find the files that the names of a cell lead to, in the kernel.

        Args:
            values: A function that returns the values of the names; it is called only if this process has open files.
            codes: Code objects of the cell.
            ranks: How many ranks share what is not opened anew.
            all_are_wanted: Whether it is unknown which names later cells will read.

        Raises:
            LaunchRefused: The cell moves in a file that is open for writing, or leads to a connection of SQLite.
        """
        there = list(regular_files())
        if not there:
            return cls()
        behind = ObjectsBehind.of(values())
        if ranks > 1:
            _refuse_shared_places(behind, codes)
            _refuse_databases(behind)
        read = [each for each in there if each.is_read]
        if not (all_are_wanted or _may_lead_to(behind, {each.number for each in read})):
            read = []
        logged = [getattr(reference(), "stream", None) for reference in list(logging._handlerList)]  # type: ignore[attr-defined]
        logged = [file for file in logged if _is_written(file) and not _is_of_the_server(file)]
        files = {id(file): file for file in (*(obj for _, obj in behind.found if _is_written(obj)), *logged)}
        return cls(read, list(files.values()))

    @contextmanager
    def opened_anew(self) -> Iterator[dict[int, int]]:
        """Open the files that are read for one rank, which is forked in the block.

        Yield, by the descriptor that the rank inherits, the one to put into its place.

        Raises:
            LaunchRefused: A file cannot be opened again.
        """
        fresh: dict[int, int] = {}
        try:
            for each in self.read:
                with suppress(_Gone):
                    fresh[each.number] = _opened_again(each)
            yield fresh
        finally:
            for number in fresh.values():
                os.close(number)


def take_places(fresh: Mapping[int, int]) -> None:
    """Put this rank's own descriptions into the places of the inherited ones, in a forked rank.

    Files that a library has closed at the fork are left alone: matplotlib forgets its fonts there.
    """
    for number, own in fresh.items():
        with suppress(OSError):
            if os.path.sameopenfile(own, number):
                os.dup2(own, number, inheritable=os.get_inheritable(number))
        os.close(own)


class _Gone(Exception):
    """The notebook has closed the file meanwhile."""


def _opened_again(file: _Descriptor) -> int:
    """Return a new description of the file, at the same position; also of one whose name is deleted."""
    try:
        if os.readlink(f"/proc/self/fd/{file.number}").removesuffix(_DELETED) != file.path.removesuffix(_DELETED):
            raise _Gone  # the number is another file's
        position = os.lseek(file.number, 0, os.SEEK_CUR)
        fresh = os.open(f"/proc/self/fd/{file.number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EBADF, errno.ENOENT):
            raise _Gone from error
        raise LaunchRefused(
            f"{os.path.basename(file.path)} is open in the notebook, and cannot be opened again for each rank "
            f"({error.strerror}): ranks would take what they read from each other. Open it in this cell."
        ) from error
    os.lseek(fresh, position, os.SEEK_SET)
    return fresh


def regular_files() -> Iterator[_Descriptor]:
    """Yield this process's open regular files.

    Left out are those that every notebook has open, and no program of its own: the standard streams, the history of
    IPython, the log of the run that begins, and the fonts of its last picture.
    """
    streams = (getattr(stream, "_original_stdstream_copy", None) for stream in (sys.stdout, sys.stderr))
    left_out = [0, 1, 2, *(number for number in streams if type(number) is int)]
    standard = []
    for number in left_out:
        with suppress(OSError):
            standard.append(os.fstat(number))
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return
    for number in map(int, numbers):
        with suppress(OSError):  # it was closed meanwhile
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or any(os.path.samestat(status, each) for each in standard):
                continue
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(_NOT_FILES) or os.path.basename(path).startswith(_OF_IPYTHON):
                continue
            flags = _flags(number)
            is_read = flags & os.O_ACCMODE == os.O_RDONLY
            is_of_none = _FONTS in path if is_read else f"{os.sep}{LOG_FOLDER}" in path
            if not is_of_none and not flags & getattr(os, "O_PATH", 0):
                yield _Descriptor(number, path, is_read)


def _flags(number: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_GETFL)


def _may_lead_to(behind: ObjectsBehind, numbers: Collection[int]) -> bool:
    """Return whether the objects have one of the descriptors, or may have it where Python does not see it."""
    if not numbers:
        return False
    kinds = {type(obj) for _, obj in behind.found}
    return not behind.is_whole or any(map(_may_hide, kinds)) or any(_number(obj) in numbers for _, obj in behind.found)


def _may_hide(kind: type) -> bool:
    """Return whether objects of the type may have a descriptor that only C code sees."""
    if issubclass(kind, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
        return False
    bases = [base for base in kind.__mro__ if package_of(base) not in _WITHOUT_DESCRIPTORS]
    return not all("__dict__" in vars(base) or "__slots__" in vars(base) for base in bases)


def _number(obj: Any) -> int | None:
    """Return the descriptor that an object is, or that it reads."""
    if type(obj) is int:
        return obj
    if issubclass(type(obj), io.FileIO) and not obj.closed:
        return int(obj.fileno())
    return None


def _is_of_the_server(file: Any) -> bool:
    """Return whether it writes to where the kernel's own output went before ipykernel took it: the server's log."""
    with suppress(Exception):
        original = [getattr(stream, "_original_stdstream_copy", None) for stream in (sys.stdout, sys.stderr)]
        return any(os.path.samestat(os.fstat(file.fileno()), os.fstat(each)) for each in original if each is not None)
    return False


def _is_written(file: Any) -> bool:
    """Return whether it is one of Python's own files, open for writing to a regular file."""
    try:
        return (
            issubclass(type(file), io.IOBase)
            and type(file).__module__ in ("_io", "io")
            and file.writable()
            and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        )
    except Exception:  # closed, or in memory, or a file of the user's own
        return False


def _refuse_shared_places(behind: ObjectsBehind, codes: Sequence[types.CodeType]) -> None:
    written = [(name, obj) for name, obj in behind.found if issubclass(type(obj), io.FileIO) and _is_written(obj)]
    if not written:
        return
    called: set[str] = set()
    functions = [obj.__code__ for _, obj in behind.found if type(obj) is types.FunctionType]
    for code in (*codes, *(code for code in functions if is_users(code.co_filename))):
        called |= _names_in(code)
    for name, file in written:
        words = called & (_MOVES | _READS if file.readable() else _MOVES)
        if words and file.mode != "ab":  # lines that are added go to the end
            raise LaunchRefused(
                f"{name} ({_file_name(file)}) is open for writing in the notebook, at one place for "
                f"all ranks, and the cell calls {sorted(words)[0]}(): what one rank moves, another reads or overwrites."
                " Open the file in this cell, so that each rank has a place of its own, or use -n 1."
            )


def _file_name(file: Any) -> str:
    path = os.readlink(f"/proc/self/fd/{file.fileno()}")
    return "a file without a name" if path.endswith(" (deleted)") else os.path.basename(path)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if type(constant) is types.CodeType)
    return set(code.co_names).union(*inner)


# SQLite is not safe to fork: https://github.com/sparklemotion/sqlite3-ruby/pull/558.
def _refuse_databases(behind: ObjectsBehind) -> None:
    """Refuse connections of SQLite that any thread may use; ranks that use another one get `SQLITE` from SQLite."""
    sqlite = sys.modules.get("sqlite3")
    if sqlite is None:
        return
    for name, obj in behind.found:
        if issubclass(type(obj), sqlite.Connection) and _is_shared_database(obj):
            raise LaunchRefused(
                f"{name} leads to a connection of SQLite that the notebook has opened, and SQLite allows no use of one "
                "in another process: locks are lost, and rows are read from wrong places. Open it in this cell, with "
                "sqlite3.connect()."
            )


def _is_shared_database(connection: Any) -> bool:
    """Return whether several threads may use the connection, and its database is a file."""
    found: list[bool] = []

    def ask() -> None:
        with suppress(Exception):  # bound to its thread, or closed
            found.append(any(row[2] for row in connection.execute("PRAGMA database_list")))

    thread = threading.Thread(target=ask, name="nbaccel-database")
    thread.start()
    thread.join()
    return any(found)


# --- the notebook's file, afterwards ------------------------------------------------------------------------------


_READERS = (
    *(io.TextIOWrapper, io.BufferedReader, io.FileIO),
    *(gzip.GzipFile, bz2.BZ2File, lzma.LZMAFile, zipfile.ZipExtFile),
)


class ReadFile(Kind):
    """Files that are open for reading: their position, and that they are closed.

    What is below (a `GzipFile` has a file) belongs to them and is not read. A file open for writing may have one in
    memory below it, which is.
    """

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        if not obj.closed and obj.writable():
            if type(attributes := getattr(obj, "__dict__", None)) is dict:
                yield ("attributes", None), attributes
            for name in ("buffer", "raw"):
                if issubclass(type(below := getattr(obj, name, None)), io.BytesIO):
                    yield ("below", name), below

    def mark(self, obj: Any) -> Any:
        """Return whether it counts, and its position; None for the position in the middle of `for line in file`."""
        if obj.closed or obj.writable() or not obj.readable() or not obj.seekable():
            return None
        with suppress(OSError):
            return (obj.tell(),)
        return (None,)

    def change(self, obj: Any, mark: Any) -> Any:
        if mark is None:
            return None
        if obj.closed:
            return ("closed", 0)
        position = _position(obj)
        return None if position == mark[0] else ("at", position)

    def writing(self, obj: Any, change: Any) -> Write:
        if obj.closed:
            raise CannotWrite("the notebook has closed it meanwhile")
        word, position = change
        return obj.close if word == "closed" else lambda: obj.seek(position)


READ_FILE: Kind = ReadFile()


def kind_of_file(kind: type) -> Kind | None:
    """Return the kind of objects of a type that may be files open for reading; None for other types."""
    return READ_FILE if issubclass(kind, _READERS) else None


def _position(file: Any) -> int:
    """Return the position of the next character that the program would read, as `seek` takes it.

    A text file does not tell it in the middle of `for line in file`. Then it is found by the text that the file has
    read ahead, and checked: the bytes from there have to be that text.

    Raises:
        OSError: It cannot be found.
    """
    with suppress(OSError):
        return int(file.tell())
    below = file.buffer
    ahead = below.tell()
    below.seek(0, os.SEEK_END)
    rest = file.read()  # what was decoded before: there is nothing more to read
    encoding = "utf-8" if file.encoding.lower() in ("utf-8-sig", "utf_8_sig") else file.encoding  # without its mark
    for text in (rest, rest.replace("\n", "\r\n")):
        position = ahead - len(text.encode(encoding, file.errors))
        if position < 0:
            continue
        below.seek(position)
        with suppress(UnicodeError):
            if below.read(ahead - position).decode(encoding, file.errors) == text:
                file.seek(position)
                return int(position)
    raise OSError("the position in a text file that is being iterated over is not known")
