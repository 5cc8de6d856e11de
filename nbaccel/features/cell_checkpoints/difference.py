"""CellDifference: all that a cell has changed since the head of its outermost loop, and its file. Runs in ranks.

A file has the names that were bound and deleted, the contents of changed objects, new objects by value, and sums of all
that it does not have. It is data: ``difference.json`` and ``difference.safetensors`` (`data_codec`). A run that goes
on has made the state at the head again. It is compared first, then written into, in place, so that every alias stays
one. What no file of data can hold is refused by name when it would be saved first.

Changed values are found by sums, as of batch norm's statistics and of ``.data`` torch counts no writes.
"""

from __future__ import annotations

import ast
import io
import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nbaccel.base.quantities import with_article
from nbaccel.base.values import frozen
from nbaccel.errors import CannotResume, CannotSave, CheckpointCorrupt
from nbaccel.features.cell_checkpoints.data_codec import Decoder, Encoder, NoData, refuse_state
from nbaccel.features.cell_checkpoints.head_state import (
    CODE,
    SCALARS,
    HeadState,
    KindsOfCells,
    Seen,
    is_refused_name,
    local_name,
    shown,
    text_of,
    users_roots,
)
from nbaccel.namespace.inventory import ObjectPlace, is_the_users
from nbaccel.namespace.kind import Entries, Write
from nbaccel.namespace.wrappers import plain
from nbaccel.train.checkpoint.content import load_tensors
from nbaccel.train.checkpoint.manifest import FileRecord
from nbaccel.train.checkpoint.serialization import ToHost, on_host, write_tensors

__all__ = ["DRAWN", "CellDifference", "Remade", "Restored", "StoredDifference"]

DRAWN = "_nbaccel_drawn"
"""Attribute of a loader's iterator: its loader, and the random states when it was made and when it drew first."""

_NAME = "difference"
_VERSION = 1
_MOST_NAMED = 3
"""Objects that a message names."""

_MOST_FACTS = 1_000
"""Plain values of names that are kept for a comparison."""

Remade = Callable[[DataLoader[Any], Any, Any, int], Any]
"""Makes an iterator of a loader that has handed out so many batches, from the random states at its making and first
draw; nothing is fetched."""

_OTHER = (
    "other than in the run that is continued. The cells above, or the lines before the loop, draw it anew (seed them), "
    "or read other data"
)


@frozen
class CellDifference:
    """The difference of a notebook to the state at the head.

    Args:
        data: What JSON holds.
        tensors: On the CPU, by their names in `data`.
        unsaved: Roots whose values no file holds and that have no state: functions, progress bars, closed files; each
            with the reason. A run that goes on runs the statements that bind them again, or leaves them unbound.
        notes: Sentences about objects of which it cannot be known whether they changed.
    """

    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unsaved: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def between(cls, head: HeadState, roots: Mapping[str, Any], to_host: ToHost = on_host) -> CellDifference:
        """Return the difference of `roots` now to `head`.

        Args:
            roots: As those of `HeadState`, with the locals of all functions on the way to the present position.
            to_host: Brings a tensor of that name to the CPU; for a thread that writes later it has to copy.

        Raises:
            CannotSave: Something has changed that no file of data can hold; the message names it.
        """
        now = users_roots(roots)
        encoder = Encoder(head, to_host)
        changes: list[Any] = []
        written: dict[str, Any] = {}
        for seen, change in head.changes():
            content = _without_iterator(seen, change)
            if not seen.kind.is_data:
                if _is_shown(seen):
                    continue
                _refuse(shown(seen.place), with_article(type(seen.obj).__name__))
            try:
                changes.append([text_of(seen.place), encoder.change(content)])
            except NoData as error:
                _refuse(f"{shown(seen.place)}{error.steps}", error.what)
            if (digest := seen.kind.digest(seen.obj, seen.kind.mark(seen.obj))) is not None:
                written[text_of(seen.place)] = digest
        names: dict[str, Any] = {}
        unsaved: dict[str, str] = {}
        for root, value in now.items():
            if isinstance(value, _BaseDataLoaderIter) and DRAWN in vars(value):
                names[root] = _iterator(encoder, value)
                continue
            if root in head.roots and _is_as_before(value, head.roots[root]):
                continue
            try:
                names[root] = encoder.encoded(value)
            except NoData as error:
                if (reason := _why_stateless(value)) is None:
                    _refuse(f"{local_name(root)}{error.steps}", error.what)
                unsaved[root] = reason
        deleted = [root for root in head.roots if (":" not in root and root not in now) or root in unsaved]
        data = {
            "version": _VERSION,
            "records": encoder.records,
            "changes": changes,
            "names": names,
            "deleted": deleted,
            "unsaved": unsaved,
            "sums": head.sums(without=[text for text, _ in changes]),
            "written": written,
            "facts": _facts(head, names),
        }
        return cls(data, encoder.tensors, unsaved, tuple(head.doubts()))

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write the files into `folder`, without flushing; return their records by name. A thread may do it."""
        path = folder / f"{_NAME}.json"
        path.write_text(json.dumps(self.data), encoding="utf-8")
        records = {path.name: FileRecord.of(path)}
        if self.tensors:
            tensors = folder / f"{_NAME}.safetensors"
            records[tensors.name] = write_tensors(tensors, self.tensors, {"format": "pt"})
        return records


@frozen
class StoredDifference:
    """A difference as it was read from its files. It may come from anywhere, and is checked when it is applied.

    Args:
        data, tensors, unsaved: Those of the `CellDifference`.
    """

    path: Path
    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    unsaved: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> StoredDifference:
        """Read the files in `folder`.

        Raises:
            CheckpointCorrupt: They are not what `CellDifference.write` writes.
        """
        path, file = folder / f"{_NAME}.json", folder / f"{_NAME}.safetensors"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != _VERSION:
                raise CheckpointCorrupt(f"{path} was written by another version of nbaccel", str(path))
            roots = [*data["names"], *data["deleted"], *data["unsaved"]]
            if not all(map(_may_be_bound, roots)):
                raise ValueError(f"names that no cell binds: {roots}")
            return cls(path, data, load_tensors(file) if file.exists() else {}, dict(data["unsaved"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error!r}", str(path)) from error

    @property
    def roots(self) -> Collection[str]:
        """Roots that are bound when it is applied."""
        return list(self.data["names"])

    def apply(self, head: HeadState, remade: Remade) -> Restored:
        """Compare the state at the head with that of the run that is continued, then write the difference into it.

        Args:
            remade: Makes an iterator of a loader.

        Raises:
            CannotResume: The cells above, or the lines before the loop, have made another state.
            CheckpointCorrupt: The file is not what `CellDifference.write` writes. Nothing was written.
        """
        with self._as_corrupt():
            changes = {str(text): content for text, content in self.data["changes"]}
            sums, written = dict(self.data["sums"]), dict(self.data["written"])
        there = head.objects()
        now = head.sums(without=changes)
        missing = [text for text in changes if text not in there]
        other = [text for text, total in sums.items() if now.get(text) != total]
        _compare([*missing, *other])
        with self._as_corrupt():
            decoder = Decoder(self.data["records"], self.tensors, head)
            contents = {text: decoder.change(content) for text, content in changes.items()}
            bound = self.data["names"].items()
            iterators = {root: [*map(decoder.decoded, value[1:])] for root, value in bound if _is_iterator(value)}
            names = {root: decoder.decoded(value) for root, value in bound if root not in iterators}
            fills = decoder.fills()
            for fill in fills:
                fill()
            writes = [self._writing(there[text], content) for text, content in contents.items()]
            for write in writes:
                write()
        again = {
            text: seen.kind.digest(seen.obj, seen.kind.mark(seen.obj)) for text in written if (seen := there[text])
        }
        _compare([text for text, total in written.items() if again[text] != total])
        with self._as_corrupt():
            names |= {root: _remade(remade, *parts) for root, parts in iterators.items()}
            notes = _notes(self.data["facts"], head, names)
        return Restored(names, list(self.data["deleted"]), notes, [*fills, *writes])

    def _writing(self, seen: Seen, content: Any) -> Write:
        if not seen.kind.is_data:
            raise ValueError(f"{shown(seen.place)} is no data")
        if type(content) is tuple and len(content) == 1:
            refuse_state(content[0])
        return seen.kind.writing(seen.obj, content)

    def _as_corrupt(self) -> _AsCorrupt:
        return _AsCorrupt(self.path)


class _AsCorrupt:
    """Raises any error of the block as `CheckpointCorrupt`: what a file says may be anything."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise CheckpointCorrupt(
                f"{self._path} does not fit this notebook, or is damaged: {error!r}", str(self._path)
            ) from error


@frozen
class Restored:
    """The names that the caller has to bind, and the writes that were done.

    Args:
        names: Values to bind, by root.
        deleted: Roots to delete.
        notes: Lines to say.
        writes: Write all contents.
    """

    names: Mapping[str, Any]
    deleted: list[str]
    notes: list[str]
    writes: list[Callable[[], object]]

    def write_again(self) -> None:
        """Write all contents once more, into the same objects: code that ran since may have changed them."""
        for write in self.writes:
            write()


def _compare(other: list[str]) -> None:
    """Raise `CannotResume` for places whose objects are other ones."""
    if other:
        names = list(dict.fromkeys(map(_shown_text, other)))
        more = " ..." if len(names) > _MOST_NAMED else ""
        raise CannotResume(f"{', '.join(names[:_MOST_NAMED])}{more}: {_OTHER}")


def _refuse(name: str, what: str) -> NoReturn:
    raise CannotSave(
        f"{name} is {what}, which no file of data can hold, and the loop has made or changed it. Make it before the "
        "loop, or keep in its place what it is made from: numbers, texts, tensors, a state_dict()"
    )


def _shown_text(text: str) -> str:
    """Return the place behind a text of a file as a person writes it."""
    try:
        name, steps = ast.literal_eval(text if len(text) <= _LONGEST_PLACE else "")
        return shown(ObjectPlace(str(name), tuple(steps)))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return "an object"


_LONGEST_PLACE = 2_000


def _may_be_bound(root: Any) -> bool:
    name = local_name(root)
    return name.isidentifier() and is_the_users(name) and not is_refused_name(name) and _is_frame(root)


def _is_frame(root: str) -> bool:
    frame, separator, _ = root.rpartition(":")
    return not separator or frame.isdigit()


def _is_as_before(value: Any, before: Any) -> bool:
    """Return whether a name has the same object, or an equal plain value."""
    is_equal = type(value) is type(before) and type(value) in SCALARS and (value == before or value != value != before)
    return value is before or is_equal or plain(value) is plain(before)


def _why_stateless(value: Any) -> str | None:
    """Return why no file holds a value that has no state of its own; None if it may have one."""
    kind = type(value)
    if issubclass(kind, CODE):
        return "code that was made in the loop"
    if isinstance(value, io.IOBase):
        is_written_on = value.closed or (isinstance(mode := getattr(value, "mode", ""), str) and mode.startswith("a"))
        return "a file" if is_written_on else None
    if issubclass(kind, types.GeneratorType):
        return "a generator that has ended" if value.gi_frame is None else None
    if hasattr(kind, "__next__"):
        return None
    own = KindsOfCells().of(value)
    return f"{with_article(kind.__name__)}, which belongs to its process" if own is None or not own.is_data else None


_OF_THE_SCREEN = ("IPython.", "ipywidgets.", "logging.", "matplotlib.", "tqdm.")


def _is_shown(seen: Seen) -> bool:
    """Return whether an object only shows something: the run that goes on shows it from where it is."""
    return f"{type(seen.obj).__module__}.".startswith(_OF_THE_SCREEN)


def _without_iterator(seen: Seen, content: Any) -> Any:
    """Leave out the iterator that a loader with persistent workers keeps: it is made again."""
    is_kept = type(content) is Entries and seen.place.steps[-1:] == (("attributes", None),)
    return content.without(["_iterator"]) if is_kept and "_iterator" in content.entries() else content


def _iterator(encoder: Encoder, iterator: Any) -> Any:
    drawn = vars(iterator)[DRAWN]
    return ["iterator", *map(encoder.encoded, (drawn.loader, drawn.created, drawn.first)), int(iterator._num_yielded)]


def _is_iterator(value: Any) -> bool:
    return type(value) is list and value[:1] == ["iterator"]


def _remade(remade: Remade, loader: Any, created: Any, first: Any, taken: Any) -> Any:
    """Return an iterator of a loader of the notebook at its position; nothing is fetched."""
    if not isinstance(loader, DataLoader) or type(taken) is not int or taken < 0:
        raise ValueError("an iterator of no loader")
    return remade(loader, created, first, taken)


def _facts(head: HeadState, names: Collection[str]) -> dict[str, Any]:
    """Return plain values of names that the file does not bind: the run that goes on has its own, and says so."""
    found = {root: value for root, value in head.roots.items() if type(value) in SCALARS and root not in names}
    return {root: repr(found[root])[:_LONGEST_FACT] for root in list(found)[:_MOST_FACTS]}


_LONGEST_FACT = 80


def _notes(facts: Mapping[str, Any], head: HeadState, names: Collection[str]) -> list[str]:
    now = _facts(head, names)
    other = [root for root, value in facts.items() if root in now and now[root] != value]
    return [
        f"{local_name(root)} is {now[root]} here, and was {facts[root]:.{_LONGEST_FACT}} in the run that is continued"
        for root in other[:_MOST_NAMED]
    ]
