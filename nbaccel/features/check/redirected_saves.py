"""Writes elsewhere what a program saves by torch and safetensors in a dry run. Runs in ranks.

`torch.save` and `save_file` of safetensors write below a folder of the run. Their files are found under their own names
by `torch.load`, `load_file`, `open`, and by those functions of `os` that `os.path`, `pathlib`, `glob` and `shutil` use:
`stat`, `listdir`, `scandir`, `rename`, `replace`, `remove`, `rmdir`. Copies of them by `shutil` lie there too.
Other files are written in their own places, and put back: `kept_originals`. Imports no torch.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

from nbaccel.features.check.dry_run.redirection import Redirection
from nbaccel.launching.ipc.import_hooks import when_loaded

__all__ = ["put_everywhere", "redirect_saves"]

_OURS = "nbaccel."
_AROUND_SAVES = (f"{_OURS}launching.libraries.", f"{_OURS}features.")
"""Modules that also put something around `torch.save`, and are not its callers."""


def redirect_saves(folder: str) -> None:
    """Begin to write below `folder` what the program saves. Called once per process, before `OneFile`.

    nbaccel's own checkpoints are left alone: `nbaccel/features/check/dry_run/redirected_checkpoints.py`.
    """
    saves = _Saves(Redirection(folder))
    when_loaded({"torch": partial(_wrap_torchs_saves, saves), "safetensors.torch": partial(_wrap_save_file, saves)})
    os.stat = _reading(os.stat, saves)
    builtins.open = io.open = _reading(builtins.open, saves)
    os.rename, os.replace = _moving(os.rename, saves), _moving(os.replace, saves)
    os.remove, os.unlink = _removing(os.remove, saves), _removing(os.unlink, saves)
    os.rmdir = _removing_folders(os.rmdir, saves)
    os.listdir, os.scandir = _listing(os.listdir, saves), _scanning(os.scandir, saves)
    put_everywhere(
        {
            shutil.rmtree: _removing_folders(shutil.rmtree, saves),
            shutil.copyfile: _copying(shutil.copyfile, saves.found, saves.place),
            shutil.copymode: _copying(shutil.copymode, saves.found, saves.found),  # the other parts of `copy`, `copy2`
            shutil.copystat: _copying(shutil.copystat, saves.found, saves.found),
        }
    )


class _Saves:
    """The files that were saved elsewhere.

    Args:
        places: Where.
    """

    def __init__(self, places: Redirection) -> None:
        self.places = places
        self._known: set[str] = set()

    def place(self, given: Any) -> str | None:
        """Return where to save what the program saves at `given`; None if that is no path."""
        path = _path(given)
        if path is None:
            return None
        place = self.places.to_write(path)
        if place != path:
            self._known.add(os.path.abspath(path))
        return place

    def is_known(self, given: Any) -> bool:
        """Return whether this rank has saved elsewhere what the program means by `given`."""
        path = _path(given) if self._known else None
        return path is not None and os.path.abspath(path) in self._known

    def found(self, given: Any) -> str | None:
        """Return the path where a rank has written the file that the program calls `given`; None if it is in its own
        place.
        """
        path = _path(given)
        place = None if path is None else self.places.to_read(path)
        return None if place is None or place == path else place

    def move(self, source: str, target: Any, moves: Callable[..., None]) -> None:
        """Move a file or folder that was saved elsewhere; `source` is its place."""
        path = _path(target)
        if path is not None:
            moves(source, self.places.to_write_folder(path) if os.path.isdir(source) else self.place(path))

    def forget(self, given: Any) -> None:
        path = _path(given)
        if path is not None:
            self._known.discard(os.path.abspath(path))


def _path(given: Any) -> str | None:
    return os.fsdecode(given) if isinstance(given, (str, bytes, os.PathLike)) else None


def _wrap_torchs_saves(saves: _Saves, torch: Any) -> None:
    put_everywhere(
        {
            torch.save: _redirected(torch.save, saves.place, 1, "f"),
            torch.load: _redirected(torch.load, saves.found, 0, "f"),
        }
    )


def _wrap_save_file(saves: _Saves, module: Any) -> None:
    put_everywhere(
        {
            module.save_file: _redirected(module.save_file, saves.place, 1, "filename"),
            module.load_file: _redirected(module.load_file, saves.found, 0, "filename"),
            module.safe_open: _redirected(module.safe_open, saves.found, 0, "filename"),
        }
    )


def put_everywhere(wrapped: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Give functions the places of others in all modules, and in the cells, that have imported these by their names.

    Args:
        wrapped: The function to put into the place of each.
    """
    places = {id(function): new for function, new in wrapped.items()}
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict):
            for name in [name for name, value in list(namespace.items()) if id(value) in places]:
                namespace[name] = places[id(namespace[name])]


def _redirected(
    function: Callable[..., Any], choose: Callable[[Any], str | None], position: int, name: str
) -> Callable[..., Any]:
    """Return `function` with the path that `choose` returns for its argument.

    Args:
        position, name: Those of that argument.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_named = len(args) <= position
        given = kwargs.get(name) if is_named else args[position]
        place = None if _is_called_by_us() else choose(given)
        if place is None:
            return function(*args, **kwargs)
        if is_named:
            return function(*args, **kwargs | {name: place})
        return function(*args[:position], place, *args[position + 1 :], **kwargs)

    return call


def _is_called_by_us() -> bool:
    """Return whether the caller of a wrapped function is nbaccel, which knows where it writes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (caller := f"{frame.f_globals.get('__name__')}.").startswith(_AROUND_SAVES):
        frame = frame.f_back
    return frame is not None and caller.startswith(_OURS)


def _is_relative_to_a_descriptor(options: Mapping[str, Any]) -> bool:
    return any(value is not None for name, value in options.items() if name.endswith("dir_fd"))


def _reading(function: Callable[..., Any], saves: _Saves) -> Callable[..., Any]:
    """Return `os.stat` or `open`, which look at the other place for what was saved there."""
    opens = function is not os.stat
    name = "file" if opens else "path"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_relative_to_a_descriptor(kwargs) or not (args or name in kwargs):
            return function(*args, **kwargs)
        given, rest = (args[0], args[1:]) if args else (kwargs.pop(name), ())
        writes = opens and bool(set("wax+") & set(str(rest[0] if rest else kwargs.get("mode", "r"))))
        if not writes and saves.is_known(given) and (place := saves.found(given)) is not None:
            return function(place, *rest, **kwargs)
        try:
            return function(given, *rest, **kwargs)
        except FileNotFoundError:
            # Another rank may have saved it, or the folder exists only there.
            place = saves.place(given) if writes else saves.found(given)
            if place is None or place == given:
                raise
        return function(place, *rest, **kwargs)

    return call


def _moving(function: Callable[..., None], saves: _Saves) -> Callable[..., None]:
    @functools.wraps(function)
    def move(src: Any, dst: Any, **kwargs: Any) -> None:
        place = None if _is_relative_to_a_descriptor(kwargs) else saves.found(src)
        if place is None or (os.path.isdir(place) and os.path.lexists(src)):
            function(src, dst, **kwargs)
        if place is not None:
            saves.move(place, dst, function)
            saves.forget(src)

    return move


def _removing(function: Callable[..., None], saves: _Saves) -> Callable[..., None]:
    @functools.wraps(function)
    def remove(path: Any, **kwargs: Any) -> None:
        place = None if _is_relative_to_a_descriptor(kwargs) else saves.found(path)
        function(path if place is None else place, **kwargs)
        saves.forget(path)

    return remove


def _removing_folders(function: Callable[..., None], saves: _Saves) -> Callable[..., None]:
    remove_tree = shutil.rmtree

    @functools.wraps(function)
    def remove(path: Any, *args: Any, **kwargs: Any) -> None:
        place = None if _is_relative_to_a_descriptor(kwargs) else saves.found(path)
        if place is None or os.path.lexists(path):
            function(path, *args, **kwargs)
        if place is not None:
            remove_tree(place, ignore_errors=True)

    return remove


def _copying(
    function: Callable[..., Any], found: Callable[[Any], str | None], chosen: Callable[[Any], str | None]
) -> Callable[..., Any]:
    """Return a function of `shutil` for two paths, which leaves the copy of what was saved elsewhere there too."""

    @functools.wraps(function)
    def copy(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        place = found(src)
        if place is None:
            return function(src, dst, *args, **kwargs)
        function(place, chosen(dst) or dst, *args, **kwargs)
        return dst

    return copy


def _listing(function: Callable[..., list[Any]], saves: _Saves) -> Callable[..., list[Any]]:
    @functools.wraps(function)
    def listdir(path: Any = ".") -> list[Any]:
        place = saves.found("." if path is None else path)
        if place is None:
            return function(path)
        names = function(place)
        if os.path.lexists(path):
            names += [name for name in function(path) if name not in names]
        return names

    return listdir


def _scanning(function: Callable[..., Any], saves: _Saves) -> Callable[..., Any]:
    @functools.wraps(function)
    def scandir(path: Any = ".") -> Any:
        place = saves.found("." if path is None else path)
        if place is None:
            return function(path)
        entries: dict[Any, Any] = {}
        for folder in [path, place] if os.path.lexists(path) else [place]:
            with function(folder) as found:
                entries |= {entry.name: entry for entry in found}
        return _Entries(entries.values())

    return scandir


class _Entries(contextlib.AbstractContextManager["_Entries", None]):
    """Entries of several folders, as `os.scandir` returns those of one."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release nothing: the folders are closed already."""
