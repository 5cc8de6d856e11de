"""Redirect what a program saves in a dry run. Runs in ranks; imports no torch.

A file or folder at `/a/b` is written to `FOLDER/a/b`, and found there again under its own name. Where the real run
could not write, the name stays as it is, so that the same error is raised.
"""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["Redirection"]


class Redirection:
    """Paths below `folder` in the place of others. It makes the folders that a path needs, and writes nothing else."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)

    def place(self, path: str) -> str:
        """Return the place of the file or folder `path`, whether it exists or not; of one that is a place, itself."""
        path = os.path.abspath(path)
        is_place = path == self._folder or path.startswith(self._folder + os.sep)
        return path if is_place else self._folder + path

    def original(self, place: str) -> str:
        """Return the path whose place is `place`."""
        return place.removeprefix(self._folder)

    def to_read(self, path: str) -> str:
        """Return where to read `path`: its place, if something was written there."""
        place = self.place(path)
        return place if os.path.lexists(place) else path

    def to_write(self, path: str) -> str:
        """Return where to write the file `path`; `path` itself if it cannot be written."""
        parent, place = os.path.dirname(os.path.abspath(path)), self.place(path)
        is_new = not os.path.exists(path)
        may_write = os.path.isdir(parent) and os.access(parent if is_new else path, os.W_OK) and not os.path.isdir(path)
        if not may_write and not os.path.isdir(os.path.dirname(place)):
            return path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def to_write_folder(self, path: str) -> str:
        """Return where to make the folder `path`, whose parents may not exist; `path` itself if it cannot be made."""
        place = self.place(path)
        above = os.path.abspath(path)
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        if not (os.path.isdir(above) and os.access(above, os.W_OK)) and not os.path.isdir(os.path.dirname(place)):
            return path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def to_share(self, path: str) -> str:
        """Return a folder in the place of `path`, in which all that is in `path` is found, and new things are made."""
        place = self.to_write_folder(path)
        if place == path or os.path.isdir(place):
            return place
        os.makedirs(place, exist_ok=True)
        with suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileExistsError):  # another rank was faster
                    os.symlink(entry.path, os.path.join(place, entry.name))
        return place
