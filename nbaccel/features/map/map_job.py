"""One map: its items, its folder beside `out`, and the joined answers. Opened in the kernel, in ranks and in scripts.

While it runs, ``answers.jsonl.parts`` holds the manifest, the claims and the records of each worker; the folder can be
copied, and another session goes on with it. When each item has an answer or an error, they are joined in order, renamed
to `out`, and ``answers.jsonl.manifest.json`` is all that stays beside it. Until then the answers that `out` had before
stay as they are, also where the call overwrites them.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeGuard

from nbaccel.base.quantities import plural
from nbaccel.errors import CannotContinue, CannotSave
from nbaccel.features.map.answer_list import Answers
from nbaccel.features.map.claim_log import ClaimLog, LifeLock, locked
from nbaccel.features.map.formats import Format, format_of
from nbaccel.features.map.item_list import ItemMark, ItemStream, as_items, is_read_whole, longest_first
from nbaccel.features.map.map_manifest import MapManifest, id_of, key_text, read_manifest
from nbaccel.features.map.records import AnswerIndex, AnswerRecord, RecordFile
from nbaccel.features.source.source_mark import SourceMark

__all__ = ["IN_MEMORY", "MapJob", "as_items"]

IN_MEMORY = "nbaccel-map-"
"""Beginning of the names of folders for answers in memory."""

_ABANDONED_S = 600.0
"""Age of such a folder from which on nobody needs it if no process has it open: its ranks were killed."""

_MOST_LOSSES = 3
"""Number of times that answers are asked again which were written and are missing at the join."""

_MOST_RACES = 1000
"""Number of times that the folder may be removed by another process while it is being opened."""


_WAYS = "overwrite=True drops them and starts anew; another name for out keeps both"
_KEEPING = "retry_failed=True keeps them and does the rest by the new code; "


@dataclass(frozen=True, slots=True)
class _Call:
    """The wishes of a call about answers that exist already.

    Args:
        stream: The items, if they are one.
        overwrites: What is something else may be dropped.
        retries: Failed items.
        is_watched: See `MapJob.open`.
    """

    stream: ItemStream | None
    overwrites: bool
    retries: bool
    is_watched: bool = False
    _compared: dict[str, str] = field(default_factory=dict)

    def difference(self, known: Mapping[str, Any]) -> str:
        """Return in words what differs between the stream and that of finished answers. Reads it, once."""
        assert self.stream is not None
        if (name := id_of(known)) not in self._compared:
            blocks = known.get("blocks")  # the version before has none
            self._compared[name] = "" if blocks is None else self.stream.difference(blocks, keeps=self.overwrites)
        return self._compared[name]


class MapJob:
    """A map and its files.

    Args:
        out: The file of answers; None for answers in memory.
        folder: The folder of what is not joined yet.
        order: The items by length, longest first; None for their own order.
        tries: How often an item may fail alone.
        batch_size: Most items of one call of the function; None to choose.
        call: Equal in all ranks of one call.

    Attributes:
        total: Number of items; None for a stream.
        news: What a person should read before it begins; most often empty.
    """

    def __init__(
        self, out: Path | None, folder: Path, manifest: MapManifest, order: Sequence[int] | None, tries: int,
        batch_size: int | None, call: str,
    ) -> None:  # fmt: skip
        self.out = out
        self.folder = folder
        self.order = order
        self.tries = tries
        self.batch_size = batch_size
        self._manifest = manifest
        self._joined: Answers | None = None
        self._presence: LifeLock | None = None
        self._token = call
        self._id = ""
        self._losses = 0
        self.news = ""

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
        mark_of_items: ItemMark | None = None,
        is_watched: bool = False,
    ) -> Self:
        """Return the map, its folder made or found. Several processes may open it at once.

        Args:
            items: As `as_items` returns them.
            overwrite: Begin anew where `out` has something else than the answers to this call.
            token: Equal in all ranks of one call, so that the first of them alone asks failed items again.
            folder: The folder of answers in memory, if several processes share it; it need not exist.
            marks: The sources of `function` and `setup`, if another rank of the call has found them.
            mark_of_items: That of `items`, if it is known already.
            is_watched: A launcher starts ranks that die again, so a run that has ended as a whole was ended from
                outside.

        Raises:
            CannotContinue: `out` has other answers than those that the call asks for, or is used in another way.
            CannotSave: The folder cannot be made.
            ValueError, TypeError: An argument is not valid.
        """
        _check_numbers(tries, batch_size)
        target = None if out is None else _absolute(Path(out))
        format_of(target)  # here, where the caller sees it, rather than at the first answer
        mark = mark_of_items or ItemMark.of(items)
        if target is None:  # they are asked for nothing else
            marks = SourceMark({}), SourceMark({})
        marks = marks or (SourceMark.of(function), SourceMark.of(setup))
        manifest = MapManifest(mark.total, mark.checksum, *marks, key_text(key))
        if target is None:
            folder = folder or Path(tempfile.mkdtemp(prefix=IN_MEMORY))
            _remove_abandoned(Path(tempfile.gettempdir()))
        else:
            _make(target.parent, parents=True)
            folder = target.with_name(f"{target.name}.parts")
        order = longest_first(items) if mark.total and is_read_whole(items) else None  # type: ignore[arg-type]
        job = cls(target, folder, manifest, order, tries, batch_size, token or uuid.uuid4().hex)
        stream: Any = items if job.is_stream else None
        if stream is not None and not hasattr(stream, "difference"):
            stream = ItemStream(stream)
        job._begin(_Call(stream, overwrite, retry_failed, is_watched))
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

    def done(self) -> int:
        """Return how many items have an answer or an error by now; those that are asked again have none. Reads all."""
        claims = self.claims()
        with suppress(FileNotFoundError):  # nobody has begun, or all is joined
            claims.refresh()
        return self.records().done_since(claims.round)

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

        Raises:
            CannotSave: They are missing each time.
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
                self._losses += 1
                if self._losses > _MOST_LOSSES:
                    raise CannotSave(
                        f"{self.folder} has lost answers that were written, {self._losses} times, now those to "
                        f"{plural(len(missing), 'item')}: is its disk healthy? The same call goes on",
                        str(self.folder),
                    )
                claims.ask_again(missing, uuid.uuid4().hex, new_round=False)
                return False
            self._join(found, claims)
        return self.is_finished

    def _join(self, found: AnswerIndex, claims: ClaimLog) -> None:
        joined = self.folder / "joined"
        _remove(joined)
        self.format.join(found, joined)
        _sync(joined)
        if self.out is None:
            (self.folder / "is-joined").touch()
            return
        facts: dict[str, Any] = {
            "joined": claims.total,
            "bytes": _size(joined),
            "failed": found.failures(),
            "token": self._token,
        }
        if self.is_stream:
            facts["blocks"] = [[stop, checksum] for _, (stop, checksum) in sorted(claims.blocks.items())]
        _remove(self._manifest_path)  # first: it is about what `out` had before
        if self.out.is_dir() or joined.is_dir():
            _remove(self.out)
        os.replace(joined, self.out)
        self._write(self._manifest_path, id=self._id, **facts)
        self._in_folder.unlink()  # first: from here on the folder is not looked at again
        self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove the folder, whose lock is held, under another name, so that no other worker adds a file meanwhile."""
        shutil.rmtree(self._rest, ignore_errors=True)  # of a process that was killed here
        os.rename(self.folder, self._rest)
        shutil.rmtree(self._rest, ignore_errors=True)

    def _remove_rest(self) -> None:
        """Remove what a process left that was killed while it removed the folder of joined answers."""
        with suppress(OSError):  # most often there is nothing, and nobody may be able to write here
            if self._lock.exists():
                with locked(self._lock):
                    if not (self._in_folder.exists() or self.claims().anyone()):
                        self._remove_folder()
            shutil.rmtree(self._rest, ignore_errors=True)

    def close(self, reader: int = 0, readers: int = 1) -> None:
        """Let other calls overwrite `out`; the last of `readers` removes the folder of answers in memory.

        Args:
            reader: The number of this process among them.
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
            with suppress(OSError), locked(self._lock):
                self._remove_folder()

    # -- the beginning

    @property
    def _lock(self) -> Path:
        return self.folder / "job.lock"

    @property
    def _rest(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.joined")

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
        if not self.out.exists() or _id_at(self._manifest_path) != self._id:
            return False
        return _id_at(self._in_folder) != self._id

    def _begin(self, call: _Call) -> None:
        """Find the answers that are there, or make the folder and come to it.

        Finished answers are found without a lock and a folder: they may lie where nobody can write.
        """
        joined = None if self.out is None or self._in_folder.exists() else self._look_at_out(call)
        if self._finds(joined, call):
            self._id = id_of(joined)
            self._remove_rest()
            return
        for _ in range(_MOST_RACES):
            _make(self.folder)
            self._refuse_foreign()
            # Another process may join, and remove the folder, meanwhile.
            with suppress(FileNotFoundError), _names(self.folder), locked(self._lock):
                try:
                    return self._begin_locked(call)
                finally:
                    if not self._in_folder.exists():  # refused, or finished
                        self._remove_folder()
        raise CannotSave(f"{self.folder} is removed whenever it is made: take another name for out", str(self.folder))

    def _refuse_foreign(self) -> None:
        """Refuse a folder that has something and no lock, which is the first file in one of ours."""
        with _names(self.folder), suppress(FileNotFoundError):
            names = os.listdir(self.folder)
            if names and self._lock.name not in names and not self._lock.exists():
                raise CannotContinue(
                    f"{self.folder} has files, and nbaccel.map did not write them: it needs a folder of this name, so "
                    "move yours, or take another name for out"
                )

    def _begin_locked(self, call: _Call) -> None:
        claims = self.claims()
        there = self._look(self._in_folder, self.folder, call)
        joined = None if isinstance(there, dict) or self.out is None else self._look_at_out(call)
        if self._finds(joined, call):
            self._id = id_of(joined)
            return  # whatever the folder has: another call, which is to replace them, was not finished
        if isinstance(there, CannotContinue):
            self._make_way(there, call.overwrites, claims)
        if isinstance(joined, CannotContinue) and not call.overwrites:
            raise joined
        if not isinstance(there, dict):
            self._clear()  # of a process that was killed here
            if isinstance(joined, dict):
                self._reopen(joined)
            self._write(self._in_folder, token=self._token, id=uuid.uuid4().hex)
            there = json.loads(self._in_folder.read_text())
        elif self._manifest.difference_of_code(there):  # from here on they are answers by this code
            if claims.anyone():
                raise CannotContinue(
                    f"{self._name} is being written by a run with the earlier code: stop that run first, and the same "
                    "call goes on by the new code"
                )
            self._write(self._in_folder, token=there.get("token"), id=id_of(there))
        self._id = id_of(there)
        self._go_on(claims, call)
        self._presence = claims.attend()

    def _go_on(self, claims: ClaimLog, call: _Call) -> None:
        if call.retries and (failed := self.records().failures()):
            claims.ask_again(failed, self._token, new_round=True)
        if not claims.anyone():
            if call.is_watched:
                claims.give_up_all()
            shutil.rmtree(self.folder / "failing", ignore_errors=True)
            shutil.rmtree(self.folder / "blocks", ignore_errors=True)  # of another session: they are drawn again

    def _make_way(self, why: CannotContinue, overwrites: bool, claims: ClaimLog) -> None:
        """Empty a folder of something else, if nobody works in it and it may be dropped.

        Raises:
            CannotContinue: Not so.
        """
        is_alive = claims.anyone()
        if overwrites and is_alive:
            raise CannotContinue(
                f"{self._name} is being written by another run, so it cannot be overwritten; "
                "stop that run first, or take another name for out"
            )
        # A function that failed with everything was mended: there is nothing to keep.
        if not overwrites and (is_alive or self.has_answers):
            raise why
        self._clear()

    def _finds(self, joined: dict[str, Any] | CannotContinue | None, call: _Call) -> TypeGuard[dict[str, Any]]:
        """Return whether the answers in `out` are those that the call asks for, with nothing left to do."""
        if not isinstance(joined, dict):
            return False
        return not (call.retries and joined["failed"] and joined.get("token") != self._token)

    def _look_at_out(self, call: _Call) -> dict[str, Any] | CannotContinue | None:
        """Return the manifest of the answers in `out`, or why they are not those to this call; None: there are none."""
        assert self.out is not None
        if not self.out.exists():
            return None
        if not self._manifest_path.exists():
            return CannotContinue(
                f"{self.out.name} exists, and nbaccel.map did not write it: overwrite=True replaces it, "
                "another name for out keeps it"
            )
        known = self._look(self._manifest_path, self.out, call)
        if call.stream is None or not self._finds(known, call) or known.get("token") == self._token:
            return known  # of this call, or its items are compared when they are drawn
        if difference := call.difference(known):
            anew = "; the generator was read to compare it: make it anew" if call.stream.is_drawn_once else ""
            return CannotContinue(f"{self.out.name} has answers to other items ({difference}): {_WAYS}{anew}")
        return known

    def _look(self, path: Path, place: Path, call: _Call) -> dict[str, Any] | CannotContinue | None:
        """Return the manifest at `path`, of the answers in `place`; or why these are not those to this call.

        Those by other code are taken if the call retries what failed, and there is something left to do.
        """
        if not path.exists():
            return None
        try:
            known = read_manifest(path, is_joined=place == self.out)
        except CannotContinue as error:
            return error
        is_left = place == self.folder or bool(known["failed"])
        if not (why := self._difference(known, place, by_any_code=call.retries and is_left)):
            if code := self._manifest.difference_of_code(known):
                self.news = (
                    f"answers {code.partition(';')[0]} stay; what failed and what is left is done by the new code"
                )
            return known
        if known.get("token") == self._token:
            raise CannotContinue(f"the ranks of this call do not pass the same: {why}")
        is_for_code = is_left and not self._difference(known, place, by_any_code=True)
        return CannotContinue(f"{why}: {_KEEPING if is_for_code else ''}{_WAYS}")

    def _difference(self, known: dict[str, Any], place: Path, by_any_code: bool = False) -> str:
        """Return why answers are not those to this call, or were changed; empty if they are as they were."""
        if difference := self._manifest.difference(known, by_any_code):
            return f"{place.name} has answers {difference}"
        if place == self.out and (size := _size(place)) != known["bytes"]:
            return f"{place.name} was changed after it was written ({known['bytes']:,} bytes then, {size:,} now)"
        return ""

    def _reopen(self, joined: dict[str, Any]) -> None:
        """Write joined answers as records, so that those to failed items can be asked again."""
        assert self.out is not None
        file = self.record_file("joined")
        form, failed = self.format, frozenset(joined["failed"])
        try:
            file.append(
                AnswerRecord(index, form.pack(index, answer)) if index not in failed
                else AnswerRecord(index, form.pack_error(index, answer.error), is_failed=True)
                for index, answer in enumerate(form.read(self.out))
            )  # fmt: skip
        finally:
            file.close()
        self.claims().skip_to(joined["joined"], joined.get("blocks") or [[joined["joined"], ""]])
        self.note_answers()

    def _write(self, path: Path, **more: Any) -> None:
        """Write the manifest, with more facts, at once and on the disk. The lock is held."""
        unfinished = self.folder / "manifest.unfinished"
        unfinished.write_text(json.dumps({**self._manifest.as_json, **more}, indent=1))
        _sync(unfinished)
        os.replace(unfinished, path)

    def _clear(self) -> None:
        """Remove all but the lock, which is held; a process that waits for it may make the folder of records."""
        for path in self.folder.iterdir():
            if path != self._lock:
                _remove(path)
        (self.folder / "records").mkdir(mode=0o700, exist_ok=True)

    @property
    def _name(self) -> str:
        return self.folder.name if self.out is None else self.out.name


def _id_at(path: Path) -> str | None:
    """Return the name of the map that a manifest is about; None if there is none."""
    try:
        return id_of(read_manifest(path))
    except CannotContinue:  # it is gone, or damaged
        return None


def _absolute(out: Path) -> Path:
    try:
        return out.expanduser().absolute()
    except FileNotFoundError as error:
        raise CannotSave(
            f'out="{out}" is in the working folder, which is gone: name the file with its whole path', str(out)
        ) from error


def _make(folder: Path, parents: bool = False) -> None:
    with _names(folder):
        try:
            folder.mkdir(mode=0o777 if parents else 0o700, parents=parents, exist_ok=True)
        except FileNotFoundError as error:  # here nothing that another process does
            raise PermissionError(error.errno, error.strerror) from error


@contextmanager
def _names(folder: Path) -> Iterator[None]:
    """Let errors of files name a folder of answers; that it is not there is another matter.

    Raises:
        CannotSave: It cannot be made, or not be written.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CannotSave(
            f"{folder} cannot be written ({error.strerror or error}): mend that, or name a file in another folder",
            str(folder),
        ) from error


def _check_numbers(tries: int, batch_size: int | None) -> None:
    for name, number in {"tries": tries, "batch_size": batch_size}.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} must be a whole number from 1, got {number!r}")


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
