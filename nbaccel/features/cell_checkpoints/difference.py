"""CellDifference: all that a cell has changed since the head of its outermost loop, and its file. Runs in ranks.

A file has the names that were bound and deleted, the contents of changed objects, new objects by value, and sums of all
that it does not have. It is data: ``difference.json`` and ``difference.safetensors`` (`data_codec`). A run that goes
on has made the state at the head again. It is compared first, then written into, in place, so that every alias stays
one. What no file of data can hold is refused by name when it would be saved first.

Changed values are found by sums, as of batch norm's statistics and of ``.data`` torch counts no writes.
"""

from __future__ import annotations

import ast
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nbaccel.base.quantities import with_article
from nbaccel.base.values import frozen
from nbaccel.errors import CannotResume, CannotSave, CheckpointCorrupt
from nbaccel.features.cell_checkpoints.continued_passes import batches_taken
from nbaccel.features.cell_checkpoints.data_codec import Decoder, Encoder, NoData, NotMade, refuse_state
from nbaccel.features.cell_checkpoints.head_state import (
    OF_THE_SCREEN,
    SCALARS,
    HeadState,
    Seen,
    is_refused_name,
    local_name,
    shown,
    stateless,
    text_of,
    users_roots,
)
from nbaccel.features.cell_checkpoints.loader_draws import DRAWN
from nbaccel.features.cell_checkpoints.made_again import MadeAgain, is_alike, made_objects, prepared
from nbaccel.namespace.inventory import ObjectPlace, is_the_users
from nbaccel.namespace.kind import Entries, Write
from nbaccel.namespace.wrappers import plain
from nbaccel.train.checkpoint.content import load_tensors
from nbaccel.train.checkpoint.manifest import FileRecord
from nbaccel.train.checkpoint.serialization import ToHost, on_host, write_tensors

__all__ = ["CellDifference", "Remade", "Restored", "StoredDifference"]

_NAME = "difference"
_VERSION = 4
_MOST_NAMED = 3
"""Objects that a message names."""

_MOST_FACTS = 1_000
"""Plain values of names that are kept for a comparison."""

Remade = Callable[[DataLoader[Any], Any, Any, int, Any], Any]
"""Makes an iterator of a loader that has handed out so many batches, from the random states at its making and first
draw, and the begin of its pass; nothing is fetched."""

_OTHER = (
    "other than in the run that is continued. The cells above, or the lines before the loop, draw it anew (seed them, "
    "as by torch.manual_seed(0) above what draws it), or read other data"
)

_TRAINED = (
    " than at the head of the loop in the run that is continued. Either this session has trained already, and the "
    "cells above, which make it, have to run again first; or they make another one now"
)
_NOT_THERE = (
    "no such name is here. Run the cells that make it; ranks that start from a clean process have the names that the "
    "cell reads, and those in --in"
)
_GROWN = f"of another size{_TRAINED}"
_FILLED = f"with other entries{_TRAINED}"


@frozen
class CellDifference:
    """The difference of a notebook to the state at the head.

    Args:
        data: What JSON holds.
        tensors: On the CPU, by their names in `data`.
        unsaved: Roots whose values no file holds and that have no state: functions, progress bars, closed files; each
            with the reason. A run that goes on runs the statements that bind them again, or leaves them unbound.
        made: Roots of objects without a form as data; their statements run again, then what is data of them is written.
        notes: Sentences about objects of which it cannot be known whether they changed.
    """

    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unsaved: Mapping[str, str] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def between(
        cls,
        head: HeadState,
        roots: Mapping[str, Any],
        to_host: ToHost = on_host,
        can_make: Callable[[str], bool] = lambda root: False,
        frames: int | None = None,
        can_wait: Callable[[str], bool] = lambda root: True,
        is_read: Callable[[str], bool] = lambda root: True,
    ) -> CellDifference:
        """Return the difference of `roots` now to `head`.

        Args:
            roots: As those of `HeadState`, with the locals of all functions on the way to the present position.
            to_host: Brings a tensor of that name to the CPU; for a thread that writes later it has to copy.
            can_make: Says whether the statements that bind a root run again when the run goes on.
            frames: See `HeadState.keep_frames`.
            can_wait: Says whether a root may be bound at the position, when all is made, and nothing reads it before.
            is_read: Says whether a run that goes on may read a root before it binds it.

        Raises:
            CannotSave: Something has changed that no file of data can hold; the message names it.
        """
        if frames is not None:
            head.keep_frames(frames)
        now = users_roots(roots)
        bound = {root: value for root, value in now.items() if not head.has(root) or _is_other(value, head.roots[root])}
        iterators = {root: value for root, value in bound.items() if _is_drawn_from(value)}
        unreachable = head.unreachable(now)  # also of a stage of the cell that is over: its objects are not made again
        changed = [
            each for each in _with_settings(head, _changes(head)) if text_of(each[0].place) not in {*unreachable}
        ]
        made = MadeAgain.among(
            {root: value for root, value in bound.items() if root not in iterators},
            [content for _, content in changed],
            head,
            can_make,
        )
        encoder = Encoder(head, to_host, made.places)
        changes = [[text_of(seen.place), _encoded(seen, content, encoder)] for seen, content in changed]
        names: dict[str, Any] = {root: _iterator(encoder, root, value) for root, value in iterators.items()}
        unsaved: dict[str, str] = {}
        dropped: dict[str, str] = {}
        for root, value in bound.items():
            if root in iterators or root in made.roots:
                continue
            if not can_wait(root) and made.is_below(value, head):
                _refuse(local_name(root), f"{with_article(type(value).__name__)} that a call has left")
            try:
                names[root] = encoder.encoded(value)
            except NoData as error:
                if (reason := stateless(value)) is not None:
                    unsaved[root] = reason
                elif is_read(root):
                    _refuse(f"{local_name(root)}{error.steps}", error.what)
                else:
                    dropped[root] = with_article(type(value).__name__)
        try:
            contents = list(made.contents(encoder))
        except NoData as error:
            _refuse(error.place or f"a part of {_listed(map(local_name, made.roots))}{error.steps}", error.what)
        lost = {*unsaved, *dropped, *made.roots}
        data = {
            "version": _VERSION,
            "records": encoder.records,
            "changes": changes,
            "names": names,
            "deleted": [root for root in head.roots if (":" not in root and root not in now) or root in lost],
            "unsaved": unsaved,
            "dropped": dropped,
            "made": made.roots,
            "copies": {root: encoder.encoded(original) for root, original in made.copies.items()},
            "others": {root: encoder.encoded(original) for root, original in made.others.items()},
            "contents": contents,
            "unreachable": unreachable,
            "sums": head.sums(without={*(text for text, _ in changes), *unreachable}),
            "written": {text_of(seen.place): digest for seen, _ in changed if (digest := _digest(seen)) is not None},
            "sizes": {text_of(seen.place): size for seen, _ in changed if (size := _size(seen)) is not None},
            "had": {text_of(seen.place): had for seen, content in changed if (had := _had(seen, content)) is not None},
            "facts": _facts(head, bound),
            "settings": _settings(head),
            "loaders": _loaders(head),
        }
        return cls(data, encoder.tensors, unsaved, made.roots, tuple(head.doubts()))

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
        data, tensors, unsaved, made: Those of the `CellDifference`.
    """

    path: Path
    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    unsaved: Mapping[str, str]
    made: list[str]

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
            roots = [*data["names"], *data["deleted"], *data["unsaved"], *data["dropped"], *data["made"]]
            if not all(map(_may_be_bound, roots)):
                raise ValueError(f"names that no cell binds: {roots}")
            tensors = load_tensors(file) if file.exists() else {}
            return cls(path, data, tensors, dict(data["unsaved"]), list(data["made"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error!r}", str(path)) from error

    @property
    def roots(self) -> Collection[str]:
        """Roots that are bound when it is applied, or filled."""
        return list(self.data["names"])

    def apply(self, head: HeadState, remade: Remade, before_writing: Callable[[], None] = lambda: None) -> Restored:
        """Compare the state at the head with that of the run that is continued, then write the difference into it.

        Args:
            remade: Makes an iterator of a loader.
            before_writing: Called once all is compared and decoded; what fails from then on leaves objects changed.

        Raises:
            CannotResume: The cells above, or the lines before the loop, have made another state.
            CheckpointCorrupt: The file is not what `CellDifference.write` writes. Nothing was written.
        """
        with _AsCorrupt(self.path):
            changes = [str(text) for text, _ in self.data["changes"]]
            sums, without = dict(self.data["sums"]), {*changes, *self.data["unreachable"]}
            sizes = dict(self.data["sizes"])
            loaders = {text: list(facts) for text, facts in self.data["loaders"].items() if text not in without}
        there = head.objects()
        _refuse_other_loaders(loaders, _loaders(head))
        grown = [text for text, size in sizes.items() if text in there and _size(there[text]) != size]
        if grown:
            raise CannotResume(f"{_listed(map(_shown_text, grown))}: {_GROWN}")
        if lost := [text for text in changes if text not in there and _root_of(text) not in head.roots]:
            raise CannotResume(f"{_listed(map(_shown_text, lost))}: {_NOT_THERE}")
        now = head.sums(without=without)
        missing = [text for text in changes if text not in there]
        # A rank of a clean process has what a class reads inside of that class, and not by its name.
        here = {text: total for text, total in sums.items() if _root_of(text) in head.roots}
        _compare([*missing, *(text for text, total in here.items() if now.get(text) != total)])
        return Restored(self, head, remade, before_writing)


class Restored:
    """A notebook into which a difference was written.

    Attributes:
        names: Values to bind, by root.
        deleted: Roots to delete.
        notes: Lines to say.
    """

    def __init__(
        self, stored: StoredDifference, head: HeadState, remade: Remade, before_writing: Callable[[], None]
    ) -> None:
        self._before_writing = before_writing
        self._path = stored.path
        self._data = data = stored.data
        self._objects = head.objects()
        self._remade = remade
        self._decoder = Decoder(data["records"], stored.tensors, head)
        self._writes: list[Callable[[], object]] = []
        self._made = stored.made
        self._is_filled = False
        self._changes: list[Any] = []
        self._names: dict[str, Any] = {}
        self.deleted: list[str] = list(data["deleted"])
        with _AsCorrupt(self._path):
            self._changes, self._names = list(data["changes"]), dict(data["names"])
            self.notes = _notes(data["facts"], head, {*data["names"], *stored.made, *stored.unsaved})
            self.notes += _notes_on_settings(data["settings"], self._objects)
            self.notes += [
                f"{local_name(root)} ({what!s:.40}) is not in the checkpoint, and is unbound until a line binds it"
                for root, what in data["dropped"].items()
            ]
        self.names: dict[str, Any] = self._written()
        if not self._made:
            self.names |= self.fill({})

    def fill(self, roots: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write into the objects that statements have made again, and return the names to bind to such objects.

        Nothing is done before all of them are there, and nothing a second time.

        Args:
            roots: The roots by now.

        Raises:
            CannotResume: The statements have made other objects.
            CheckpointCorrupt: The file is damaged.
        """
        if self._is_filled or not all(root in roots for root in self._made):
            return {}
        self._is_filled = True
        with _AsCorrupt(self._path):
            made = {root: roots[root] for root in self._made}
            there = made_objects(made)
            of_roots = {text: (name, kept) for text, name, kept, _ in self._data["contents"]}
            text_of_root = {root: text_of(ObjectPlace(root)) for root in self._data["others"]}
            lost = [
                root
                for root, text in text_of_root.items()
                if text in of_roots and not is_alike(there.get(text), *of_roots[text])
            ]
            copies = self._data["copies"] | {root: self._data["others"][root] for root in lost}
            if copies:
                self._decoder.make(there)
                originals = {root: self._decoder.decoded(original) for root, original in copies.items()}
                there = made_objects({root: each for root, each in made.items() if root not in lost}, originals)
        self._refuse_other(there)
        with _AsCorrupt(self._path):
            self._decoder.make(there, is_last=True)
            names = {root: there[text_of_root[root]].obj for root in lost}
        return names | self._written(there)

    def _refuse_other(self, there: Mapping[str, Seen]) -> None:
        with _AsCorrupt(self._path):
            contents = [(str(text), str(name), kept) for text, name, kept, _ in self._data["contents"]]
        if other := [_shown_text(text) for text, name, kept in contents if not is_alike(there.get(text), name, kept)]:
            raise CannotResume(f"{_listed(other)}: made otherwise than in the run that is continued")

    def write_again(self, roots: Mapping[str, Any] | None = None, is_last: bool = True) -> Mapping[str, Any]:
        """Write all contents once more, into the same objects: code that ran since may have changed them.

        Args:
            roots: The roots by now: see `fill`.
            is_last: All statements that make objects again have run.

        Returns:
            Names to bind, as of `fill`.

        Raises:
            CannotResume: What the statements should have made again is not there.
        """
        names = self.fill(roots or {})
        if is_last and not self._is_filled:
            lost = [local_name(root) for root in self._made if root not in (roots or {})]
            raise CannotResume(f"{', '.join(lost)}: not made again by the lines before the position")
        for write in self._writes:
            write()
        return names

    def _written(self, made: Mapping[str, Seen] | None = None) -> dict[str, Any]:
        """Write what can be written by now; return the names that can be bound.

        Everything is decoded first, so that a damaged file changes nothing.
        """
        decoder, names, iterators, contents, waiting = self._decoder, {}, {}, {}, []
        with _AsCorrupt(self._path):
            sums = dict(self._data["written"])
            for text, content in self._changes:
                try:
                    contents[text] = decoder.change(content)
                except NotMade:
                    if made is not None:
                        raise
                    waiting.append([text, content])
            for root, value in list(self._names.items()):
                try:
                    if _is_iterator(value):
                        iterators[root] = [decoder.decoded(part) for part in value[1:]]
                    else:
                        names[root] = decoder.decoded(value)
                    del self._names[root]
                except NotMade:
                    if made is not None:
                        raise
            hads = dict(self._data["had"])
            other = [text for text, each in contents.items() if _had(self._objects[text], each) != hads.get(text)]
        if other:
            raise CannotResume(f"{_listed(map(_shown_text, other))}: {_FILLED}")
        with _AsCorrupt(self._path):
            parts = self._data["contents"] if made is not None else []
            late = [prepared((made or {})[text], content, decoder) for text, _, _, content in parts]
            fills = decoder.fills()
            self._before_writing()
            for fill in fills:
                fill()
            writes = [
                *(_writing(self._objects[text], content) for text, content in contents.items()),
                *(write for each in late if (write := each()) is not None),
            ]
            for write in writes:
                write()
        self._changes = waiting
        self._writes += [*fills, *writes]
        _compare([text for text in contents if text in sums and _digest(self._objects[text]) != sums[text]])
        with _AsCorrupt(self._path):
            return names | {root: _remade(self._remade, *parts) for root, parts in iterators.items()}


def _writing(seen: Seen, content: Any) -> Write:
    if not seen.kind.is_data:
        raise ValueError(f"{shown(seen.place)} is no data")
    if type(content) is tuple and len(content) == 1:
        refuse_state(content[0])
    return seen.kind.writing(seen.obj, content)


def _size(seen: Seen) -> Any:
    """Return the size that an object had at the head, if the loop may fill it; for parameters their shape."""
    if issubclass(type(seen.obj), nn.Parameter):
        return list(seen.obj.shape)
    is_list = issubclass(type(seen.obj), list | deque) and type(seen.mark) is list
    return len(seen.mark) if is_list else None


def _had(seen: Seen, content: Any) -> list[bool] | None:
    """Return of each key that a change writes whether a dictionary had it at the head; None of anything else.

    Other entries may differ when a run goes on: those of a cache that cells above fill.
    """
    entries = _entries_of(seen, content)
    if entries is None:
        return None
    mark = seen.mark[0] if type(seen.mark[0]) is tuple else seen.mark  # of a class of dictionaries
    there = dict.fromkeys(mark[0])
    return [key in there for key in entries.keys]


def _entries_of(seen: Seen, content: Any) -> Entries | None:
    is_attributes = seen.place.steps[-1:] == (("attributes", None),)
    if is_attributes or not issubclass(type(seen.obj), dict) or type(seen.mark) is not tuple:
        return None
    entries = content[0] if type(content) is tuple else content
    return entries if type(entries) is Entries else None


def _digest(seen: Seen) -> Any:
    """Return the sum of the present state of an object."""
    return seen.kind.digest(seen.obj, seen.kind.mark(seen.obj))


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


def _changes(head: HeadState) -> list[tuple[Seen, Any]]:
    """Return the objects that have changed, but for those that show something, each with the content of the change."""
    found = []
    for seen, content in head.changes():
        if f"{type(seen.obj).__module__}.".startswith(OF_THE_SCREEN) and not seen.kind.is_data:
            continue
        if not seen.kind.is_data:
            _refuse(shown(seen.place), with_article(type(seen.obj).__name__))
        found.append((seen, _without_iterator(seen, content)))
    return found


def _encoded(seen: Seen, content: Any, encoder: Encoder) -> Any:
    try:
        return encoder.change(content)
    except NoData as error:
        _refuse(f"{shown(seen.place)}{error.steps}", error.what)


def _compare(other: list[str]) -> None:
    """Raise `CannotResume` for places whose objects are other ones."""
    if other:
        raise CannotResume(f"{_listed(map(_shown_text, other))}: {_OTHER}")


def _listed(names: Iterable[str]) -> str:
    """Return the first names, each once."""
    once = list(dict.fromkeys(names))
    return ", ".join(once[:_MOST_NAMED]) + (" ..." if len(once) > _MOST_NAMED else "")


def _refuse(name: str, what: str) -> NoReturn:
    raise CannotSave(
        f"{name} is {what}, which no file of data can hold, and the loop has made or changed it. Make it before the "
        "loop, or keep in its place what it is made from: numbers, texts, tensors, a state_dict()"
    )


def _shown_text(text: str) -> str:
    """Return the place behind a text of a file as a person writes it."""
    place = _place_of(text)
    return "an object" if place is None else shown(place)


def _root_of(text: str) -> str:
    place = _place_of(text)
    return "" if place is None else place.name


def _place_of(text: str) -> ObjectPlace | None:
    try:
        name, steps = ast.literal_eval(text if len(text) <= _LONGEST_PLACE else "")
        return ObjectPlace(str(name), tuple(steps))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


_LONGEST_PLACE = 2_000


def _may_be_bound(root: Any) -> bool:
    name = local_name(root)
    return name.isidentifier() and is_the_users(name) and not is_refused_name(name) and _is_frame(root)


def _is_frame(root: str) -> bool:
    frame, separator, _ = root.rpartition(":")
    return not separator or frame.isdigit()


def _is_other(value: Any, before: Any) -> bool:
    """Return whether a name has another object than before, and no equal plain value."""
    is_equal = type(value) is type(before) and type(value) in SCALARS and (value == before or value != value != before)
    return _is_drawn_from(value) or not (value is before or is_equal or plain(value) is plain(before))


def _is_drawn_from(value: Any) -> bool:
    """Return whether it is an iterator of a loader that comes back by its position."""
    return issubclass(type(value), _BaseDataLoaderIter) and DRAWN in vars(value)


def _without_iterator(seen: Seen, content: Any) -> Any:
    """Leave out the iterator that a loader with persistent workers keeps: it is made again."""
    is_kept = type(content) is Entries and seen.place.steps[-1:] == (("attributes", None),)
    return content.without(["_iterator"]) if is_kept and "_iterator" in content.entries() else content


def _iterator(encoder: Encoder, root: str, iterator: Any) -> Any:
    drawn = vars(iterator)[DRAWN]
    if (loader := drawn.loader()) is None:
        _refuse(local_name(root), "an iterator of a loader that is gone")
    try:
        states = map(encoder.encoded, (loader, drawn.created, drawn.first, batches_taken(iterator)))
        return ["iterator", *states, encoder.encoded(drawn.begin_of_pass())]
    except NoData as error:
        _refuse(f"what {local_name(root)} reads{error.steps}", error.what)


def _is_iterator(value: Any) -> bool:
    return type(value) is list and value[:1] == ["iterator"]


def _remade(remade: Remade, loader: Any, created: Any, first: Any, taken: Any, begin: Any) -> Any:
    """Return an iterator of a loader of the notebook at its position; nothing is fetched."""
    if not isinstance(loader, DataLoader) or type(taken) is not int or taken < 0:
        raise ValueError("an iterator of no loader")
    return remade(loader, created, first, taken, begin)


def _facts(head: HeadState, names: Collection[str]) -> dict[str, Any]:
    """Return plain values of names that the file does not bind: the run that goes on has its own, and says so."""
    there = head.compared_roots()
    found = {root: value for root, value in there.items() if type(value) in SCALARS and root not in names}
    return {root: repr(found[root])[:_LONGEST_FACT] for root in list(found)[:_MOST_FACTS]}


_LONGEST_FACT = 80


def _notes(facts: Mapping[str, Any], head: HeadState, names: Collection[str]) -> list[str]:
    now = _facts(head, names)
    other = [root for root, value in facts.items() if root in now and now[root] != value]
    return [
        f"{local_name(root)} is {now[root]} here, and was {facts[root]:.{_LONGEST_FACT}} in the run that is continued"
        for root in other[:_MOST_NAMED]
    ]


# --- settings of optimizers, schedulers and loaders -------------------------------------------------------------------


def _with_settings(head: HeadState, changed: list[tuple[Seen, Any]]) -> list[tuple[Seen, Any]]:
    """Add the settings of optimizers and schedulers to the changes: they count with the checkpoint, as in `load_state`.

    Otherwise a learning rate that a cell above has now would hold where no scheduler moves it, and not elsewhere.
    """
    contents = {id(seen.obj): (seen, content) for seen, content in changed}
    for seen in _held_settings(head):
        if isinstance(seen.obj, list):
            contents.setdefault(id(seen.obj), (seen, (len(seen.mark), 0, list(seen.obj))))
            continue
        _, change = contents.get(id(seen.obj), (seen, Entries([], [], [])))
        entries = change.entries()
        more = {key: value for key, value in _plain_entries(seen.obj).items() if key not in entries}
        full = Entries(change.removed, [*change.keys, *more], [*change.values, *more.values()])
        contents[id(seen.obj)] = seen, full
    return list(contents.values())


def _held_settings(head: HeadState) -> Iterator[Seen]:
    """Yield the dictionaries, and lists of numbers, that settings of optimizers and schedulers are in."""
    there = {id(seen.obj): seen for _, seen in head.compared()}
    for seen in there.values():
        held: list[Any] = []
        if issubclass(type(seen.obj), torch.optim.Optimizer):
            held = [each for each in vars(seen.obj).get("param_groups", ()) if type(each) is dict]
        elif issubclass(type(seen.obj), torch.optim.lr_scheduler.LRScheduler):
            held = [*_containers(vars(seen.obj))]
        yield from (there[id(each)] for each in held if id(each) in there)


def _containers(held: Any, depth: int = 3) -> Iterator[Any]:
    """Yield a dictionary, and those within it, with the lists of numbers."""
    if type(held) is dict or _is_setting(tuple(held)):
        yield held
    for each in held.values() if type(held) is dict else held:
        if type(each) in (list, dict) and depth:
            yield from _containers(each, depth - 1)


def _is_setting(value: Any) -> bool:
    return type(value) in SCALARS or (type(value) is tuple and all(type(each) in SCALARS for each in value))


def _plain_entries(held: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if type(key) is str and _is_setting(value)}


def _settings(head: HeadState) -> dict[str, Any]:
    """Return what groups of parameters had for settings at the head, by the text of their place."""
    return {
        text_of(seen.place): {key: repr(value)[:_LONGEST_FACT] for key, value in _at_head(seen).items()}
        for seen in _held_settings(head)
        if isinstance(seen.obj, dict)
    }


def _at_head(seen: Seen) -> dict[str, Any]:
    return _plain_entries(dict(zip(*seen.mark, strict=True))) if type(seen.mark) is tuple else {}


def _notes_on_settings(then: Mapping[str, Any], there: Mapping[str, Seen]) -> list[str]:
    """Return lines about settings that a cell above makes otherwise now; the checkpoint's are taken."""
    found = []
    for text, settings in then.items():
        now = _at_head(there[text]) if text in there else {}
        for key in now:
            if key in settings and repr(now[key])[:_LONGEST_FACT] != settings[key]:
                was = f"{settings[key]:.{_LONGEST_FACT}}"
                name = f"{_shown_text(text)}[{key!r}]"
                found.append(f"{name} is {now[key]!r} here, and was {was} in the run that is continued, which is taken")
    return found[:_MOST_NAMED]


def _loaders(head: HeadState) -> dict[str, list[Any]]:
    """Return by what each loader makes its batches, by the text of its place."""
    found: dict[str, list[Any]] = {}
    for text, seen in head.compared():
        if issubclass(type(seen.obj), DataLoader):
            own = vars(seen.obj)
            batches = own.get("batch_sampler")
            size = getattr(batches, "batch_size", None) or own.get("batch_size")
            found[text] = [size if type(size) is int else None, bool(own.get("drop_last")), _sampler_of(own)]
    return found


def _sampler_of(own: Mapping[str, Any]) -> str:
    return type(own.get("sampler")).__name__


_OF_LOADERS = ("batch_size", "drop_last", "sampler")


def _refuse_other_loaders(then: Mapping[str, Any], now: Mapping[str, list[Any]]) -> None:
    """Refuse loaders that make other batches: a place in a loop counts these.

    Raises:
        CannotResume: One does.
    """
    for text, facts in then.items():
        for name, was, here in zip(_OF_LOADERS, facts, now.get(text, facts), strict=False):
            if was != here:
                raise CannotResume(
                    f"{_shown_text(text)}: its {name} is {here} here, and was {was!s:.40} in the run that is "
                    "continued, so the place in its loop is another one. Nothing was written: take the change back, or "
                    "leave --resume out to start anew."
                )
