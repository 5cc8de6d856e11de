"""The notebook's choices: they begin with nbaccel.toml, change, and are kept on request."""

from __future__ import annotations

from pathlib import Path

import pytest
from IPython.core.error import UsageError

from nbaccel.options.configuration import ConfigFile, Configuration
from nbaccel.options.run_options import RunOptions


@pytest.fixture
def file(tmp_path: Path) -> ConfigFile:
    return ConfigFile(tmp_path / "nbaccel.toml")


def test_without_a_file_nothing_is_chosen_and_there_is_no_news(file: ConfigFile) -> None:
    configuration = Configuration(file)
    assert configuration.options == RunOptions()
    assert configuration.news() == ""
    assert str(configuration) == "nothing is set"


def test_the_file_is_where_the_choices_begin_and_is_told_once(file: ConfigFile) -> None:
    file.write({"num-processes": 2, "mixed-precision": "fp16", "cpu": True, "out": ["a", "b"], "timeout": 1.5})
    configuration = Configuration(file)
    assert configuration.options == RunOptions(
        num_processes=2, mixed_precision="fp16", cpu=True, out=("a", "b"), timeout=1.5
    )
    assert configuration.news() == f"{file.path}: num-processes=2 mixed-precision=fp16 out=a,b cpu=true timeout=1.5"
    assert configuration.news() == ""


@pytest.mark.parametrize("out", ["cell", "named"])
def test_the_file_says_what_cells_leave_in_the_notebook(file: ConfigFile, out: str) -> None:
    file.path.write_text(f'out = "{out}"\n')
    configuration = Configuration(file)
    assert configuration.options == RunOptions(out=out)
    assert configuration.news() == f"{file.path}: out={out}"
    assert RunOptions(out=("model",)).over(configuration.options).names_back == ("model",)


def test_the_file_chooses_a_strategy_and_names_the_choices_for_another(file: ConfigFile) -> None:
    file.path.write_text('strategy = "fsdp"\n')
    assert Configuration(file).options == RunOptions(strategy="fsdp")
    file.path.write_text('strategy = "zero"\n')
    with pytest.raises(UsageError, match="--strategy: a strategy is auto, single, ddp, fsdp or deepspeed; got 'zero'"):
        Configuration(file).options  # noqa: B018


def test_what_is_changed_wins_over_the_file_and_leaves_it_alone(file: ConfigFile) -> None:
    file.write({"seed": 3, "accumulate": 4})
    configuration = Configuration(file)
    configuration.change(["seed=7", "accumulate="])
    assert configuration.options == RunOptions(seed=7)
    assert file.read() == {"seed": 3, "accumulate": 4}


def test_what_was_saved_is_where_the_next_notebook_begins(file: ConfigFile) -> None:
    configuration = Configuration(file)
    configuration.change(["num-processes=auto", "out=model,history", "devices=GPU-5eA,1", "seed=0", "timeout=90"])
    assert configuration.save() == (
        f"saved to {file.path}: num-processes=auto out=model,history devices=GPU-5eA,1 timeout=90.0 seed=0"
    )
    assert Configuration(file).options == configuration.options


def test_what_went_back_to_the_default_is_saved_as_that(file: ConfigFile) -> None:
    file.write({"seed": 3, "accumulate": 4})
    configuration = Configuration(file)
    configuration.change(["seed="])
    configuration.save()
    assert file.read() == {"accumulate": 4}
    configuration.reset()
    configuration.save()
    assert file.read() == {}


def test_nothing_changes_if_one_setting_is_wrong(file: ConfigFile) -> None:
    configuration = Configuration(file)
    with pytest.raises(UsageError, match="a number of ranks is 1 or more, or auto; got '0'"):
        configuration.change(["seed=3", "num-processes=0"])
    assert configuration.options == RunOptions()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("sed = 3", "nbaccel.toml: there is no setting 'sed' (did you mean seed=…?)"),
        ("accumulate = 0", "batches per optimizer step are 1 or more; got '0'"),
        ("cpu = 'maybe'", "cpu is true or false; got 'maybe'."),
        ("seed = ", "nbaccel.toml is not TOML: "),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused_until_it_is_mended(
    file: ConfigFile, content: str, sentence: str
) -> None:
    file.path.write_text(content)
    configuration = Configuration(file)
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            configuration.options  # noqa: B018
        assert sentence in str(caught.value)
        assert str(file.path) in str(caught.value)
    file.path.write_text("seed = 3")
    assert configuration.options == RunOptions(seed=3)


def test_a_folder_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        Configuration(ConfigFile(tmp_path / "gone" / "nbaccel.toml")).save()
