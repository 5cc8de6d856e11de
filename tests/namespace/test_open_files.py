"""Files that the notebook has open: where a program is in one, and which objects lead to one."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import os
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbaccel.errors import LaunchRefused
from nbaccel.namespace import open_files
from nbaccel.namespace.open_files import READ_FILE, FilesOfRanks, take_places


def _text(folder: Path, content: bytes, **how: Any) -> Callable[[], Any]:
    (folder / "text").write_bytes(content)
    return lambda: open(folder / "text", **how)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16-le", "utf-8-sig"])
@pytest.mark.parametrize("newline", [None, ""])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_text_file_goes_on_where_another_copy_of_it_is(
    tmp_path: Path, encoding: str, newline: str | None, end: str
) -> None:
    """Also in the middle of `for line in file`, where Python does not tell the place."""
    content = "".join(f"zeile {i} ä{end}" for i in range(3000)).encode(encoding)
    make = _text(tmp_path, content, encoding=encoding, newline=newline)
    with make() as here, make() as there:
        next(here), next(there)
        mark = READ_FILE.mark(there)
        for line in there:
            if line.startswith("zeile 1700 "):
                break
        READ_FILE.writing(here, READ_FILE.change(there, mark))()
        assert next(here).startswith("zeile 1701 ")
        assert there.readline().startswith("zeile 1701 "), "looking for the place changes nothing"


def test_a_place_that_cannot_be_found_is_an_error_and_no_guess(tmp_path: Path) -> None:
    with _text(tmp_path, b"a\r\nb\nc\r" * 900, encoding="ascii")() as file:
        mark = READ_FILE.mark(file)
        next(file)
        with pytest.raises(OSError, match="is not known"):
            READ_FILE.change(file, mark)


def test_compressed_files_and_members_of_archives_go_on_too(tmp_path: Path) -> None:
    content = bytes(range(256)) * 300
    with gzip.open(tmp_path / "a.gz", "wb") as made:
        made.write(content)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("member", content)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        for make in (lambda: gzip.GzipFile(tmp_path / "a.gz"), lambda: archive.open("member")):
            with make() as here, make() as there:
                mark = READ_FILE.mark(there)
                assert READ_FILE.change(there, mark) is None
                there.read(50_000)
                READ_FILE.writing(here, READ_FILE.change(there, mark))()
                assert here.read() == content[50_000:]


def test_a_file_that_was_closed_is_closed_in_the_notebook(tmp_path: Path) -> None:
    make = _text(tmp_path, b"x")
    with make() as here, make() as there:
        mark = READ_FILE.mark(there)
        there.close()
        READ_FILE.writing(here, READ_FILE.change(there, mark))()
        assert here.closed


def _generator(file: Any) -> Any:
    yield from file


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda file: file,
    "a list of them": lambda file: [0, [file]],
    "a csv.reader": csv.reader,
    "a generator": _generator,
    "an iterator": enumerate,
    "a bound method": lambda file: file.readline,
    "a closure": lambda file: lambda: file.readline(),
    "its number": lambda file: {"number": file.fileno()},
    "an object that Python does not look into": lambda file: zipfile.Path,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_file_is_found_whatever_holds_it(tmp_path: Path, holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held: Any
    with _text(tmp_path, b"0123456789")() as file:
        held = HOLDERS[holder](file)
        if holder.startswith("an object that"):
            held = io.BytesIO()  # stands for an object of a package's C code
            monkeypatch.setattr(open_files, "_WITHOUT_DESCRIPTORS", frozenset())
        files = FilesOfRanks.behind(lambda: {"held": held}, (), 2)
        assert str(tmp_path / "text") in {each.path for each in files.read}


def test_nothing_is_opened_for_names_that_lead_to_no_file(tmp_path: Path) -> None:
    import torch

    layer = torch.nn.Linear(2, 2)
    with _text(tmp_path, b"0123456789")():
        values = {"layer": layer, "torch": torch, "sgd": torch.optim.SGD(layer.parameters(), 0.1), "a": [1.0, "b"]}
        assert FilesOfRanks.behind(lambda: values, (), 2).read == []


def test_names_are_not_followed_for_files_that_every_notebook_has_open(tmp_path: Path) -> None:
    logs, fonts = tmp_path / f"{open_files.LOG_FOLDER}x", tmp_path / "mpl-data" / "fonts"
    for folder in (logs, fonts):
        folder.mkdir(parents=True)
    (fonts / "a.ttf").write_bytes(b"0123456789")
    with open(logs / "run-1.log", "wb"), open(fonts / "a.ttf", "rb"):
        assert not [each for each in open_files.regular_files() if each.path.startswith(str(tmp_path))]
    with open(logs / "run-1.log", "rb") as read_by_the_program:
        assert str(read_by_the_program.name) in {str(each.path) for each in open_files.regular_files()}


def test_a_file_that_cannot_be_opened_again_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *args: Any) -> int:
        raise PermissionError(13, "Permission denied")

    with _text(tmp_path, b"0123456789")() as file:
        found = FilesOfRanks.behind(lambda: {"file": file}, (), 2).read
        files = FilesOfRanks([each for each in found if each.path == file.name])  # and no fonts of matplotlib's
        monkeypatch.setattr(os, "open", refuse)
        with (
            pytest.raises(LaunchRefused, match=r"^text is open in the notebook, and cannot be opened again for each"),
            files.opened_anew(),
        ):
            pass


def test_a_number_that_is_closed_or_another_files_by_the_fork_is_left_alone(tmp_path: Path) -> None:
    """A library may close its files in a forked child, as matplotlib does with its fonts."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 3)
    read, other = (os.open(tmp_path / name, os.O_RDONLY) for name in ("a", "b"))
    found = FilesOfRanks([open_files._Descriptor(read, str(tmp_path / "a"), True)])
    with found.opened_anew() as fresh:
        (own,) = fresh.values()
        os.dup2(other, read)
        take_places({read: os.dup(own)})
        assert os.read(read, 9) == b"bbb"
        os.close(read)
        take_places({read: os.dup(own)})
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    read = os.dup(other)
    with FilesOfRanks([open_files._Descriptor(read, str(tmp_path / "a"), True)]).opened_anew() as fresh:
        assert fresh == {}
    os.close(read)
    os.close(other)


def test_the_servers_log_is_no_file_of_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own log goes there, by a handler with a descriptor of its own."""
    with (tmp_path / "log").open("w") as log, (tmp_path / "other").open("w") as other:
        monkeypatch.setattr("sys.stderr", types.SimpleNamespace(_original_stdstream_copy=log.fileno()))
        handlers = [logging.StreamHandler(os.fdopen(os.dup(file.fileno()), "w")) for file in (log, other)]
        written = FilesOfRanks.behind(dict, (), 2, all_are_wanted=True).written
        assert handlers[0].stream not in written
        assert handlers[1].stream in written
        for each in handlers:
            each.stream.close()
