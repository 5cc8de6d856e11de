"""write_basic_config: the first line of many notebooks chooses, and changes nothing that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbaccel.options.configuration import Configuration
from nbaccel.utils import write_basic_config


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_notebooks_of_the_folder_follow_it() -> None:
    assert write_basic_config(mixed_precision="FP16") == Path("nbaccel.toml")
    assert Configuration().options.mixed_precision == "fp16"


def test_a_file_that_is_there_stays(capsys: pytest.CaptureFixture[str]) -> None:
    write_basic_config()
    before = Path("nbaccel.toml").read_text()
    assert write_basic_config("bf16") is False
    assert Path("nbaccel.toml").read_text() == before
    assert capsys.readouterr().out == "still there: nbaccel.toml; delete it, or change it by %accelerate config\n"


def test_another_place_is_written_and_nothing_else(in_a_folder: Path) -> None:
    file = write_basic_config("bf16", save_location="there.toml")
    assert [path.name for path in in_a_folder.iterdir()] == ["there.toml"]
    assert file == Path("there.toml")


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="mixed_precision must be one of 'no', 'fp16', 'bf16', got 'fp8'"):
        write_basic_config("fp8")
    with pytest.raises(ValueError, match=r"nowhere/nbaccel.toml cannot be written: No such file"):
        write_basic_config("no", "nowhere/nbaccel.toml")
    assert not Path("nbaccel.toml").exists()
