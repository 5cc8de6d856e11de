"""Agree on one save among the ranks, through files in a folder beside the checkpoint. Runs in every rank.

A checkpoint of a sharded training has files of every rank. They are written into ``.nbaccel_shards.<name of the save>``
on the checkpoint's disk, and rank 0 moves them into the unfinished checkpoint, which it commits once all of them are on
the disk. There is no collective: the same holds for a save in the background, whose thread could not take part in one
without coming between those of the training.

    rank00001@host.4711.here     this process takes part; the number is its process
    rank00001.json               its files are on the disk (their places and checksums), or its error
    rank00001.failed             the same, on a disk that has no room for the error
    outcome.json, failed         rank 0 has committed the checkpoint, or the error that all ranks raise
    rank00001@host.4711.left     it has read the outcome; who sees that all have left deletes the folder

Nobody waits for a process that is gone. A rank that does not come is waited for a few minutes, since it may evaluate or
write something of its own before.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from nbaccel.base.events import Writing, emit
from nbaccel.base.quantities import numbers_in_order
from nbaccel.base.values import frozen
from nbaccel.errors import CannotSave, CheckpointCorrupt
from nbaccel.train.checkpoint.atomic_folder import as_cannot_save, is_alive
from nbaccel.train.checkpoint.manifest import FileRecord, read_sealed, write_sealed

__all__ = [
    "Alone",
    "SaveAgreement",
    "Share",
    "delete_dead_agreements",
]

Places = dict[str, dict[str, dict[str, Any]]]
"""For each part and each of its sharded tensors: shape, dtype, and the boxes that are in files."""

_PREFIX = ".nbaccel_shards."
_MEMBER = re.compile(r"rank(?P<rank>\d+)@(?P<host>.*)\.(?P<pid>\d+)\.(?P<kind>here|left)")
_OUTCOME, _FAILED = "outcome.json", "failed"

_POLL_S = 0.02
_NOTICE_S = 10.0
"""Seconds without a sign of a rank after which a line says for whom the save waits."""

_ABSENT_S = 300.0
"""Seconds without a sign of a rank after which the save fails: an evaluation on one rank may take minutes."""

_FOREIGN_S = 1800.0
"""Seconds that a rank of another machine may write: whether its process lives cannot be seen from here."""

_YOUNG_S = 600.0
"""Age below which an agreement is left alone although no process of it is known to live."""


@frozen
class Share:
    """Files of one rank for a checkpoint: their records by name, and the places of its rows."""

    records: Mapping[str, FileRecord]
    places: Places

    def and_also(self, other: Share) -> Share:
        """Return both together."""
        return Share({**self.records, **other.records}, {**self.places, **other.places})


class Alone:
    """Agreement of a process that saves alone; see `SaveAgreement` for several."""

    def begin(self) -> None:
        """Show the other ranks that this one takes part."""

    @contextmanager
    def decided(self, target: Path) -> Iterator[None]:
        """Tell the other ranks how the block ended, in which rank 0 writes and commits `target`.

        Alone it needs none of them: where one fails meanwhile, whoever ends the run lets the block finish.
        """
        emit(Writing())
        try:
            yield
        finally:
            emit(Writing(is_over=True))

    def collect(self, folder: Path, own: Share) -> Share:
        """Wait for the files of all ranks, move them into `folder`, and return what they and rank 0 have written.

        Raises:
            CannotSave: A rank failed or did not come; or the tensors are not complete.
        """
        return Share(own.records, _joined(own.places, ()))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that nothing will come of this save; nothing happens once it is decided."""


class SaveAgreement(Alone):
    """Agreement of all ranks about one save.

    Args:
        target: The checkpoint, as this rank expects its name.
        stamp: The name of the save, equal on all ranks, and of no other save.
        committed: Finds the checkpoint that rank 0 has committed of it, if it has.
        say: Prints for a person.
    """

    def __init__(
        self,
        target: Path,
        stamp: str,
        rank: int,
        world_size: int,
        committed: Callable[[], Path | None],
        say: Callable[[str], None],
    ) -> None:
        self.folder = target.parent / f"{_PREFIX}{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"
        self._target = target
        self._stamp = stamp
        self._rank = rank
        self._world_size = world_size
        self._committed = committed
        self._say = say
        self._began = time.monotonic()
        self._is_over = False

    # -- every rank

    def begin(self) -> None:
        self._began = time.monotonic()
        with as_cannot_save(self._target):
            while True:
                self.folder.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # another process took it for a dead one, and deleted it
                    self._member("here").touch()
                    return

    def fail(self, error: BaseException) -> None:
        if not self._is_over:
            self.tell(error)
            self._leave()

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of `error`: rank 0's decides, another rank's waits for the outcome that it leads to."""
        self._is_over = True
        answer = {"error": _as_json(error, self._rank, self._target)}
        for path in self.folder.glob(f"*-rank{self._rank:05d}-of-*"):
            path.unlink(missing_ok=True)  # which may be what filled the disk
        name, mark = (
            (_OUTCOME, _FAILED) if self._rank == 0 else (f"{_name(self._rank)}.json", f"{_name(self._rank)}.failed")
        )
        try:
            self._write(name, answer)
        except OSError:
            with suppress(OSError):
                (self.folder / mark).touch()

    def _leave(self) -> None:
        with suppress(OSError):  # it is gone, or the disk is
            os.rename(self._member("here"), self._member("left"))
            left = {said["rank"] for said in _members(self.folder) if said["kind"] == "left"}
            if len(left) == self._world_size:
                shutil.rmtree(self.folder, ignore_errors=True)

    # -- rank 0

    @contextmanager
    def decided(self, target: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self._is_over = True
        with suppress(OSError):  # the checkpoint is committed: the others find it by its stamp
            self._write(_OUTCOME, {"folder": target.name})
        self._leave()

    def collect(self, folder: Path, own: Share) -> Share:
        reports = self._reports()
        records, others = dict(own.records), []
        for rank, report in sorted(reports.items()):
            mine = {name: places for name, places in report["places"].items() if name in own.places}
            others.append((rank, mine))
            wanted = {box[0] for tensors in mine.values() for place in tensors.values() for box in place["boxes"]}
            for name in wanted:
                records[name] = FileRecord(**report["files"][name])
            for name in (*wanted, *report["sealed"]):
                os.rename(self.folder / name, folder / name)
        return Share(records, _joined(own.places, others))

    def _reports(self) -> dict[int, dict[str, Any]]:
        """Wait for the reports of the other ranks; return them by rank."""
        reports: dict[int, dict[str, Any]] = {}
        missing = set(range(1, self._world_size))
        has_told = False
        while True:
            names = self._names()
            for rank in sorted(missing):
                if f"{_name(rank)}.json" in names:
                    report = self._read(f"{_name(rank)}.json")
                    if (error := report.get("error")) is not None:
                        raise _from_json(error)
                    reports[rank] = report
                elif f"{_name(rank)}.failed" in names:
                    raise CannotSave(
                        f"cannot write the checkpoint {self._target}: rank {rank} could not write its shards",
                        str(self._target),
                    )
            missing -= set(reports)
            if not missing:
                return reports
            here = {int(said["rank"]) for said in map(_MEMBER.fullmatch, names) if said is not None}
            self._refuse_lost(names, missing)
            waited_s = time.monotonic() - self._began
            if absent := missing - here:
                if waited_s > _ABSENT_S:
                    raise CannotSave(self._absent(absent, waited_s), str(self._target))
                if waited_s > _NOTICE_S and not has_told:
                    has_told = True
                    self._say(f"waiting: {self._absent(absent, waited_s)}")
            time.sleep(_POLL_S)

    # -- the other ranks

    def report(self, share: Share, sealed: Iterable[str]) -> None:
        """Tell rank 0 that this rank's files are in the folder, and on the disk.

        Args:
            sealed: Names of further files, which contain their own checksum.
        """
        files = {name: {"size": record.size, "crc32": record.crc32} for name, record in share.records.items()}
        self._write(f"{_name(self._rank)}.json", {"files": files, "places": share.places, "sealed": list(sealed)})

    def outcome(self) -> Path:
        """Wait for rank 0's decision; return the checkpoint.

        Raises:
            CannotSave: The error of rank 0, or of the rank for which it is; the same on all ranks.
        """
        self._is_over = True
        try:
            while True:
                names = self._names()
                if _OUTCOME in names:
                    answer = self._read(_OUTCOME)
                    if (error := answer.get("error")) is not None:
                        raise _from_json(error)
                    return self._target.with_name(answer["folder"])
                if _FAILED in names:
                    raise CannotSave(
                        f"cannot write the checkpoint {self._target}: rank 0 could not, nor write why",
                        str(self._target),
                    )
                self._refuse_without_rank_0(names)
                time.sleep(_POLL_S)
        except _Committed as found:
            return found.folder
        finally:
            self._leave()

    def _refuse_without_rank_0(self, names: set[str]) -> None:
        try:
            self._refuse_lost(names, {0})
            waited_s = time.monotonic() - self._began
            is_absent = not any(name.startswith(f"{_name(0)}@") for name in names)
            if is_absent and waited_s > _ABSENT_S:
                raise CannotSave(self._absent({0}, waited_s), str(self._target))
        except CannotSave as error:
            # It may have committed before it died, or before the folder went.
            if _OUTCOME not in self._names():
                if (folder := self._committed()) is not None:
                    raise _Committed(folder) from None
                raise error from None

    # -- how

    def _refuse_lost(self, names: set[str], ranks: set[int]) -> None:
        """Raise CannotSave if the process of one of `ranks` is gone, without having answered."""
        host = socket.gethostname()
        for said in map(_MEMBER.fullmatch, sorted(names)):
            if said is None or said["kind"] != "here" or int(said["rank"]) not in ranks:
                continue
            rank = int(said["rank"])
            waited_s = time.monotonic() - self._began
            is_lost = not _lives(said["pid"]) if said["host"] == host else waited_s > _FOREIGN_S
            answers = {f"{_name(rank)}.json", f"{_name(rank)}.failed"} if rank else {_OUTCOME, _FAILED}
            if is_lost and not answers & self._names():
                raise CannotSave(
                    f"cannot write the checkpoint {self._target}: rank {rank} (process {said['pid']} on "
                    f"{said['host']}) ended, or does not answer, before its part was complete. An older checkpoint of "
                    "that name is as it was.",
                    str(self._target),
                )

    def _absent(self, ranks: set[int], waited_s: float) -> str:
        who = f"rank(s) {numbers_in_order(ranks)} of {self._world_size}"
        return (
            f"{who} did not come to the save of {self._target} in {waited_s:.0f} s. The model is sharded, so every "
            "rank has a part of the checkpoint, and save_state is called by every rank: outside of `if "
            "accelerator.is_main_process`."
        )

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self.folder))
        except FileNotFoundError:
            return set()

    def _member(self, kind: str) -> Path:
        return self.folder / f"{_name(self._rank)}@{socket.gethostname()}.{os.getpid()}.{kind}"

    def _write(self, name: str, content: dict[str, Any]) -> None:
        unfinished = self.folder / f"{name}.unfinished"
        write_sealed(unfinished, {"stamp": self._stamp, **content})
        os.rename(unfinished, self.folder / name)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return read_sealed(self.folder / name)
        except (FileNotFoundError, CheckpointCorrupt) as error:
            raise CannotSave(f"cannot write the checkpoint {self._target}: {error}", str(self._target)) from error


class _Committed(Exception):
    """Rank 0 has committed the checkpoint, and cannot say so any more."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def delete_dead_agreements(place: Path) -> None:
    """Delete agreements in the folder `place` whose processes have been killed, or have left it for good."""
    with suppress(OSError):  # another user's, or gone by now
        for folder in place.glob(f"{_PREFIX}*"):
            if not _may_live(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _may_live(folder: Path) -> bool:
    try:
        is_young = time.time() - folder.stat().st_mtime < _YOUNG_S
        members = list(_members(folder))
    except FileNotFoundError:
        return False
    host = socket.gethostname()
    if not members or any(said["host"] != host for said in members):
        return is_young
    if any(said["kind"] == "here" and _lives(said["pid"]) for said in members):
        return True
    # Left by those that came: somebody of a run that lives may come later still, to read the outcome.
    return is_young and any(_lives(said["pid"]) for said in members)


def _lives(pid: str) -> bool:
    return pid == str(os.getpid()) or is_alive(pid)


def _members(folder: Path) -> list[re.Match[str]]:
    return [said for said in map(_MEMBER.fullmatch, os.listdir(folder)) if said is not None]


def _name(rank: int) -> str:
    return f"rank{rank:05d}"


def _as_json(error: BaseException, rank: int, target: Path) -> dict[str, Any]:
    if isinstance(error, CannotSave):
        return {"text": str(error), "path": error.path, "needed": error.needed_bytes, "free": error.free_bytes}
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = f"cannot write the checkpoint {target}: rank {rank} could not write its part: {said}"
    return {"text": text, "path": str(target), "needed": 0, "free": 0}


def _from_json(error: Mapping[str, Any]) -> CannotSave:
    return CannotSave(error["text"], error["path"], error["needed"], error["free"])


def _joined(own: Places, others: Iterable[tuple[int, Places]]) -> Places:
    """Return the places of all ranks together.

    Raises:
        CannotSave: The ranks have different tensors, or together not all of one.
    """
    places = {part: {name: {**place} for name, place in tensors.items()} for part, tensors in own.items()}
    for rank, theirs in others:
        for part, tensors in theirs.items():
            for name, place in tensors.items():
                known = places[part].get(name)
                if known is None or _kind(known) != _kind(place):
                    raise CannotSave(
                        f"rank {rank} holds rows of {part}: {name}, {_kind(place)}, and rank 0 has "
                        f"{_kind(known) if known else 'none'}: every rank must hold the same models and optimizers"
                    )
                known["boxes"] = [*known["boxes"], *place["boxes"]]
    for part, tensors in places.items():
        for name, place in tensors.items():
            written = sum(torch.Size(shape).numel() for _, _, shape in place["boxes"])
            if written != torch.Size(place["shape"]).numel():
                raise CannotSave(
                    f"{part}: {name} has {torch.Size(place['shape']).numel()} elements, and the ranks that save it "
                    f"hold {written}. A sharded model is saved by all of its ranks; pass it through "
                    "accelerator.prepare."
                )
    return places


def _kind(place: Mapping[str, Any]) -> str:
    return f"{place['dtype'].removeprefix('torch.')} of shape {place['shape']}"
