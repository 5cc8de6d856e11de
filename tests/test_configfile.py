"""nbaccel.toml: what is written is read again, and a file that cannot be followed is refused in one sentence."""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nbaccel.options.configuration import ConfigFile

KEYS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1)
TEXTS = st.text("a é漢\U0001f642'\"\\#=[]\n\t")
VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS


@pytest.fixture
def file(tmp_path: Path) -> ConfigFile:
    return ConfigFile(tmp_path / "nbaccel.toml")


def test_without_a_file_nothing_is_chosen(file: ConfigFile) -> None:
    assert file.read() == {}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(values=st.dictionaries(KEYS, VALUES | st.lists(TEXTS)))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]) -> None:
    file = ConfigFile(tmp_path_factory.mktemp("config") / "nbaccel.toml")
    file.write(values)  # type: ignore[arg-type]
    assert file.read() == values


def test_writing_replaces_the_file_and_leaves_nothing_beside_it(file: ConfigFile) -> None:
    file.write({"seed": 1, "cpu": True})
    file.write({"seed": 2})
    assert file.read() == {"seed": 2}
    assert [path.name for path in file.path.parent.iterdir()] == ["nbaccel.toml"]


def test_who_reads_while_it_is_written_reads_all_of_the_old_one(file: ConfigFile) -> None:
    file.write({"seed": 1})
    old = file.path.read_text()
    with file.path.open() as reader:
        file.write({"seed": 2, "cpu": True})
        assert reader.read() == old


def test_a_write_that_fails_on_its_way_leaves_the_old_file_and_nothing_beside_it(
    file: ConfigFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write({"seed": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(ValueError, match="cannot be written: No space left"):
            file.write({"seed": 2})
    assert file.read() == {"seed": 1}
    assert [path.name for path in file.path.parent.iterdir()] == ["nbaccel.toml"]


def test_the_file_says_what_it_is(file: ConfigFile) -> None:
    file.write({"num-processes": 2, "out": ["model", "history"]})
    heading, settings = file.path.read_text().split("does %accelerate config.\n")
    assert heading.startswith("# Choices for the notebooks of this folder: the long flags of %%accelerate.")
    assert settings == 'num-processes = 2\nout = ["model", "history"]\n'


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "seed 3",
            "is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 6); correct it, or del",
        ),
        (b"seed = '\xff'", "is not TOML: 'utf-8' codec can't decode byte 0xff"),
        ("[oom]\nwhat = 1", "oom is a table; every setting is one line, KEY = VALUE, with a number, true or false"),
        ("out = [1]", "out is a list of other things; every setting is one line"),
        ("seed = 1979-05-27", "seed is a date; every setting is one line"),
    ],
)
def test_what_cannot_be_followed_is_said_with_the_files_name(
    file: ConfigFile, content: str | bytes, sentence: str
) -> None:
    file.path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is the test
        file.read()
    assert str(caught.value).startswith(f"{file.path}")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_that_name_is_no_file(file: ConfigFile) -> None:
    file.path.mkdir()
    with pytest.raises(ValueError, match=r"nbaccel\.toml cannot be read: Is a directory\.$"):
        file.read()


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone/nbaccel\.toml cannot be written: No such file or directory\.$"):
        ConfigFile(tmp_path / "gone" / "nbaccel.toml").write({})


def test_what_python_reads_is_toml(file: ConfigFile) -> None:
    file.write({"devices": 'a "quoted" \\ text', "timeout": 1e20})
    assert tomllib.loads(file.path.read_text()) == {"devices": 'a "quoted" \\ text', "timeout": 1e20}
