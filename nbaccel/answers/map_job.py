"""One map: its items, its folder beside `out`, and the joined answers. Opened in the kernel, in ranks and in scripts.

While it runs, ``answers.jsonl.parts`` holds the manifest, the claims and the records of each worker; the folder can be
copied, and another session goes on with it. When each item has an answer or an error, they are joined in order, renamed
to `out`, and ``answers.jsonl.manifest.json`` is all that stays beside it.

Not here: who computes. A worker takes claims (`ClaimLog`) and appends records (`RecordFile`).
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from nbaccel.answers.answer_list import Answers
from nbaccel.answers.claim_log import ClaimLog, LifeLock, locked
from nbaccel.answers.fingerprint import checksum_of, checksum_of_sample, length_of
from nbaccel.answers.formats import Format, format_of
from nbaccel.answers.records import AnswerIndex, AnswerRecord, RecordFile
from nbaccel.answers.source_mark import SourceMark
from nbaccel.errors import CannotContinue
from nbaccel.quantities import plural
from nbaccel.values import frozen

__all__ = ["IN_MEMORY", "MapJob", "MapManifest", "as_items"]

IN_MEMORY = "nbaccel-map-"
"""Beginning of the names of folders for answers in memory."""

_ABANDONED_S = 600.0
"""Age of such a folder from which on nobody needs it if no process has it open: its ranks were killed."""

_VERSION = 2
_READ_TOO = (1, 2)
"""Versions of the manifest that are read. The first has the text of a function, and no mark of what that reads."""

_READ_WHOLE = ("builtins", "numpy", "torch", "pandas")


@frozen
class MapManifest:
    """The facts that must be the same for answers to belong to a call.

    total: number of items; None for a stream.  items: their checksum; empty for a stream, whose blocks have their own.
    function, setup: the marks of their sources.  key: what the program says about weights and settings.
    """

    total: int | None
    items: str
    function: SourceMark
    setup: SourceMark
    key: str

    @property
    def as_json(self) -> dict[str, Any]:
        """The same facts for a file."""
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return facts | {"function": self.function.names, "setup": self.setup.names}

    def difference(self, known: Mapping[str, Any]) -> str:
        """Return in words what is different in the facts of a file; empty if nothing is."""
        if self.total != (total := known["total"]):
            here = "a stream" if self.total is None else plural(self.total, "item")
            there = "a stream" if total is None else plural(total, "item")
            return f"to other items ({there}, now {here})"
        if self.items != known["items"]:
            return f"to other items (as many, {plural(self.total or 0, 'item')}, with other contents or order)"
        for name, words in {"function": "of another function", "setup": "with another setup"}.items():
            mark: SourceMark = getattr(self, name)
            if changed := mark.difference(known[name]):
                is_another = mark.is_another(known[name])
                return (
                    f"{words} ({changed})"
                    if is_another
                    else f"of other code: {changed}; put back, the same line goes on"
                )
        return f"with key={known['key']}, now key={self.key}" if self.key != known["key"] else ""


class MapJob:
    """A map and its files.

    out: the file of answers; None for answers in memory.  folder: of what is not joined yet.
    total: number of items; None for a stream.  order: the items by length, longest first; None for their own order.
    tries: how often an item may fail alone.  batch_size: most items of one call of the function; None to choose.
    """

    def __init__(
        self, out: Path | None, folder: Path, manifest: MapManifest, order: Sequence[int] | None, tries: int,
        batch_size: int | None,
    ) -> None:  # fmt: skip
        self.out = out
        self.folder = folder
        self.order = order
        self.tries = tries
        self.batch_size = batch_size
        self._manifest = manifest
        self._joined: Answers | None = None
        self._presence: LifeLock | None = None
        self._token = ""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is this process's own."""
        return {**vars(self), "_presence": None, "_joined": None}

    @classmethod
    def open(
        cls,
        items: Sequence[Any] | Iterable[Any],
        function: Callable[..., Any],
        setup: Callable[..., Any] | None,
        *,
        out: str | os.PathLike[str] | None = None,
        key: Any = None,
        overwrite: bool = False,
        retry_failed: bool = False,
        tries: int = 3,
        batch_size: int | None = None,
        token: str = "",
        folder: Path | None = None,
        marks: tuple[SourceMark, SourceMark] | None = None,
    ) -> Self:
        """Return the map, its folder made or found. Several processes may open it at once.

        items: as `as_items` returns them.
        token: equal in all ranks of one call, so that the first of them alone overwrites, or asks failed items again.
        folder: of answers in memory, if several processes share it; it need not exist.
        marks: the sources of `function` and `setup`, if another rank of the call has found them.

        Raises:
            CannotContinue: `out` has other answers than those that the call asks for, or is used in another way.
            ValueError, TypeError: an argument is not valid.
        """
        _check_numbers(tries, batch_size)
        target = None if out is None else Path(out).expanduser().absolute()
        format_of(target)  # here, where the caller sees it, rather than at the first answer
        is_stream = not hasattr(items, "__len__")
        is_read = not is_stream and type(items).__module__.partition(".")[0] in _READ_WHOLE
        total = None if is_stream else len(items)  # type: ignore[arg-type]
        checksum = ""
        if not is_stream:
            checksum = checksum_of(items) if is_read else checksum_of_sample(items)  # type: ignore[arg-type]
        if target is None:  # they are asked for nothing else
            marks = SourceMark({}), SourceMark({})
        marks = marks or (SourceMark.of(function), SourceMark.of(setup))
        manifest = MapManifest(total, checksum, *marks, repr(key))
        if target is None:
            folder = folder or Path(tempfile.mkdtemp(prefix=IN_MEMORY))
            _remove_abandoned(Path(tempfile.gettempdir()))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = target.with_name(f"{target.name}.parts")
        order = _longest_first(items) if is_read else None  # type: ignore[arg-type]
        job = cls(target, folder, manifest, order, tries, batch_size)
        job._begin(overwrite, retry_failed, token or uuid.uuid4().hex)
        return job

    # -- what there is

    @property
    def total(self) -> int | None:
        return self._manifest.total

    @property
    def is_stream(self) -> bool:
        return self._manifest.total is None

    @property
    def format(self) -> Format:
        return format_of(self.out)

    @property
    def is_finished(self) -> bool:
        """True if each item has an answer or an error, and they are joined."""
        return self._joined is not None or self._is_joined()

    def claims(self) -> ClaimLog:
        """Return the claims, as this process sees them."""
        return ClaimLog(self.folder, self._manifest.total, self.order, self._token)

    def records(self) -> AnswerIndex:
        """Return where each answer lies that exists by now. Reads all records."""
        index = AnswerIndex(self.total or 0)
        for path in sorted((self.folder / "records").glob("*")):
            index.read(path, grows=self.is_stream)
        return index

    def record_file(self, worker: str) -> RecordFile:
        """Return the file of a new worker."""
        return RecordFile(self.folder / "records" / worker)

    @property
    def has_answers(self) -> bool:
        """True once any worker has answered an item."""
        return (self.folder / "has-answers").exists()

    def note_answers(self) -> None:
        """Note that there is an answer; see `has_answers`."""
        (self.folder / "has-answers").touch()

    def answers(self) -> Answers:
        """Return the joined answers; `is_finished` is True."""
        if self._joined is None:
            failed = None
            if self.out is not None:
                failed = json.loads(self._manifest_path.read_text())["failed"]
            found = self.format.read(self.out or self.folder / "joined")
            self._joined = Answers(found, self.out, failed)
        return self._joined

    # -- the end

    def finish(self) -> bool:
        """Join the answers if there is one for each item; return whether they are joined.

        Answers that are missing, since a disk lost them with its power, are asked again: then it returns False.
        """
        if self.is_finished:
            return True
        with suppress(FileNotFoundError), locked(self._lock):  # the folder is gone if another process has joined
            if self.is_finished:
                return True
            claims = self.claims()
            claims.refresh()
            if not claims.is_complete or claims.total is None:
                return False
            found = self.records()
            if missing := [index for index in range(claims.total) if not found.is_done(index, claims.round)]:
                claims.ask_again(missing, uuid.uuid4().hex, new_round=False)
                return False
            self._join(found, claims.total)
        return self.is_finished

    def _join(self, found: AnswerIndex, total: int) -> None:
        joined = self.folder / "joined"
        _remove(joined)
        self.format.join(found, joined)
        _sync(joined)
        if self.out is None:
            (self.folder / "is-joined").touch()
            return
        size = _size(joined)
        if self.out.is_dir() or joined.is_dir():
            _remove(self.out)
        os.replace(joined, self.out)
        self._write(self._manifest_path, joined=total, bytes=size, failed=found.failures(), token=self._token)
        self._in_folder.unlink()  # first: from here on the folder is not looked at again
        self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove the folder, whose lock is held, under another name, so that no other worker adds a file meanwhile."""
        rest = self.folder.with_name(f".{self.folder.name}.joined")
        shutil.rmtree(rest, ignore_errors=True)  # of a process that was killed here
        os.rename(self.folder, rest)
        shutil.rmtree(rest, ignore_errors=True)

    def close(self, reader: int = 0, readers: int = 1) -> None:
        """Let other calls overwrite `out`; the last of `readers` removes the folder of answers in memory.

        reader: the number of this process among them.
        """
        if self._presence is not None:
            self._presence.close()
        if self.out is not None:
            return
        with suppress(FileNotFoundError):
            (self.folder / f"read-{reader}").touch()
            if sum(1 for _ in self.folder.glob("read-*")) >= readers:
                shutil.rmtree(self.folder, ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder if it has no answer: a function that failed at once may be mended, and `out` used again."""
        if not self.is_finished and not self.records().answered:
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- the beginning

    @property
    def _lock(self) -> Path:
        return self.folder / "job.lock"

    @property
    def _manifest_path(self) -> Path:
        assert self.out is not None
        return self.out.with_name(f"{self.out.name}.manifest.json")

    @property
    def _in_folder(self) -> Path:
        return self.folder / "manifest.json"

    def _is_joined(self) -> bool:
        if self.out is None:
            return (self.folder / "is-joined").exists()
        return self.out.exists() and self._manifest_path.exists() and not self._in_folder.exists()

    def _begin(self, overwrite: bool, retry_failed: bool, token: str) -> None:
        while True:
            with suppress(FileNotFoundError):  # another process has joined, and removed the folder, meanwhile
                self.folder.mkdir(mode=0o700, exist_ok=True)
                (self.folder / "records").mkdir(mode=0o700, exist_ok=True)
                with locked(self._lock):
                    try:
                        return self._begin_locked(overwrite, retry_failed, token)
                    finally:
                        if not self._in_folder.exists():  # refused, or finished
                            self._remove_folder()

    def _begin_locked(self, overwrite: bool, retry_failed: bool, token: str) -> None:
        claims = self.claims()
        self._token = token
        known = _read(self._in_folder) if self._in_folder.exists() else None
        if known is not None and known.get("token") != token:
            is_alive = claims.anyone()
            if overwrite and is_alive:
                raise CannotContinue(
                    f"{self._name} is being written by another run, so it cannot be overwritten; "
                    "stop that run first, or take another name for out"
                )
            # A function that failed with everything was mended: there is nothing to keep.
            if overwrite or not (is_alive or self.has_answers or not self._manifest.difference(known)):
                self._clear()
                known = None
        if known is None and self.out is not None and self.out.exists():
            known = self._reopen(overwrite, retry_failed)
            if known is None and self._is_joined():
                return
        if known is None:
            self._write(self._in_folder, token=token)
        else:
            self._check(known, self.folder)
            self._go_on(claims, retry_failed, token)
        self._presence = claims.attend()

    def _go_on(self, claims: ClaimLog, retry_failed: bool, token: str) -> None:
        if retry_failed and (failed := self.records().failures()):
            claims.ask_again(failed, token, new_round=True)
        if not claims.anyone():
            shutil.rmtree(self.folder / "failing", ignore_errors=True)
            shutil.rmtree(self.folder / "blocks", ignore_errors=True)  # of another session: they are drawn again

    def _reopen(self, overwrite: bool, retry_failed: bool) -> dict[str, Any] | None:
        """Deal with a file at `out`; return the manifest with which the map goes on, None if there is none."""
        assert self.out is not None
        known = _read(self._manifest_path) if self._manifest_path.exists() else None
        if known is not None and known.get("token") == self._token:
            self._check(known, self.out)
            return None  # another rank of this call was first, and all is done already
        if overwrite:
            _remove(self._manifest_path)
            _remove(self.out)
            return None
        if known is None:
            raise CannotContinue(
                f"{self.out.name} exists, and nbaccel.map did not write it: overwrite=True replaces it, "
                "another name for out keeps it"
            )
        self._check(known, self.out)
        if not (retry_failed and known["failed"]):
            return None
        file = self.record_file("joined")
        form, failed = self.format, frozenset(known["failed"])
        try:
            file.append(
                AnswerRecord(index, form.pack(index, answer)) if index not in failed
                else AnswerRecord(index, form.pack_error(index, answer.error), is_failed=True)
                for index, answer in enumerate(form.read(self.out))
            )  # fmt: skip
        finally:
            file.close()
        claims = self.claims()
        claims.skip_to(known["joined"])
        self.note_answers()
        self._write(self._in_folder)
        _remove(self._manifest_path)
        return _read(self._in_folder)

    def _check(self, known: Mapping[str, Any], place: Path) -> None:
        """Refuse answers to other questions, and a file that was changed.

        Raises:
            CannotContinue: they are.
        """
        ways = "overwrite=True drops them and starts anew; another name for out keeps both"
        if known.get("version") not in _READ_TOO:
            raise CannotContinue(f"{place.name} was written by another version of nbaccel.map: {ways}")
        if difference := self._manifest.difference(known):
            raise CannotContinue(f"{place.name} has answers {difference}: {ways}")
        if "bytes" in known and self.out is not None and self.out.exists() and _size(self.out) != known["bytes"]:
            raise CannotContinue(
                f"{place.name} was changed after it was written ({known['bytes']:,} bytes then, "
                f"{_size(self.out):,} now): {ways}"
            )

    def _write(self, path: Path, **more: Any) -> None:
        """Write the manifest, with more facts, at once and on the disk. The lock is held."""
        unfinished = self.folder / "manifest.unfinished"
        unfinished.write_text(json.dumps({"version": _VERSION, **self._manifest.as_json, **more}, indent=1))
        _sync(unfinished)
        os.replace(unfinished, path)

    def _clear(self) -> None:
        """Remove all but the lock, which is held."""
        for path in self.folder.iterdir():
            if path != self._lock:
                _remove(path)
        (self.folder / "records").mkdir(mode=0o700)

    @property
    def _name(self) -> str:
        return self.folder.name if self.out is None else self.out.name


def as_items(items: Any) -> Any:
    """Return items as a map reads them: something with a length and numbers, or a stream that is drawn once.

    Raises:
        TypeError: it is a text, a dict, a set or a table, of which it is not clear what an item is.

    >>> as_items("text")
    Traceback (most recent call last):
    TypeError: items is a list of items, got a str: for one item write [item]
    """
    kind = type(items).__qualname__
    if isinstance(items, str | bytes):
        raise TypeError(f"items is a list of items, got a {kind}: for one item write [item]")
    if isinstance(items, Mapping):
        raise TypeError(f"items is a list of items, got a {kind}: write list(items.items()), or its values")
    if isinstance(items, AbstractSet) and not isinstance(items, Mapping) and kind not in ("dict_keys", "dict_items"):
        raise TypeError(f"items is a list of items, got a {kind}, whose order is another one each time: sorted(items)")
    if hasattr(items, "columns") and hasattr(items, "to_dict"):
        raise TypeError(f'items is a list of items, got a {kind}: write items.to_dict("records"), or one column')
    if hasattr(items, "iloc") or kind in ("dict_keys", "dict_values", "dict_items"):
        return list(items)
    if hasattr(items, "__len__") and hasattr(items, "__getitem__"):
        return items
    if hasattr(items, "__iter__"):
        return iter(items) if not hasattr(items, "__len__") else _Stream(items)
    raise TypeError(f"items is a list of items, or a stream of them, got a {kind}")


class _Stream:
    """A stream whose source has a length, as a loader has: its length is not needed."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source

    def __iter__(self) -> Any:
        return iter(self._source)


def _longest_first(items: Sequence[Any]) -> Sequence[int] | None:
    """Return the items by length, the longest first; None where all are alike, so that they keep their order."""
    lengths = array("q", map(length_of, items))
    if not lengths or min(lengths) == max(lengths):
        return None
    return array("q", sorted(range(len(lengths)), key=lambda number: -lengths[number]))


def _check_numbers(tries: int, batch_size: int | None) -> None:
    for name, number in {"tries": tries, "batch_size": batch_size}.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} must be a whole number from 1, got {number!r}")


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CannotContinue(
            f"{path.name} cannot be read ({type(error).__name__}: {error}); overwrite=True starts anew"
        ) from error
    return found


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of answers in memory whose ranks were all killed, as torchrun does if one of them dies."""
    for folder in parent.glob(f"{IN_MEMORY}*"):
        with suppress(OSError):  # it is being removed by another process
            facts = folder.lstat()
            is_mine = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
            is_old = time.time() - facts.st_mtime > _ABANDONED_S
            if is_mine and is_old and not ClaimLog(folder, None).anyone():
                shutil.rmtree(folder, ignore_errors=True)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.iterdir())
    return path.stat().st_size


def _sync(path: Path) -> None:
    for each in (path, *(path.iterdir() if path.is_dir() else ())):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
