"""What was chosen for a run reaches its ranks through the environment, and wrong choices are refused."""

from __future__ import annotations

import pytest

from nbaccel.base.settings import RunSettings


@pytest.mark.parametrize(
    "settings",
    [
        RunSettings(),
        RunSettings(strict=True, batches="each", raw_precision="fp16"),
        RunSettings(strict=False, independent=True, batches="split"),
        RunSettings(strategy="fsdp"),
        RunSettings(strategy="of.another_package", mixed_precision="fp16"),
        RunSettings("bf16", 4, 7, True, True, split=2, checkpoint_every="10min", checkpoint_dir="a", keep=3, resume=""),
    ],
)
def test_ranks_read_what_the_kernel_chose(settings: RunSettings) -> None:
    assert RunSettings.from_env(settings.environ()) == settings


def test_accelerates_variable_means_fsdp_where_nothing_else_was_chosen() -> None:
    launched = {"ACCELERATE_USE_FSDP": "true"}
    assert RunSettings.from_env(launched).strategy == "fsdp"
    assert RunSettings.from_env(launched | {"NBACCEL_STRATEGY": "ddp"}).strategy == "ddp"
    assert RunSettings.from_env({"ACCELERATE_USE_FSDP": "false"}).strategy is None
    assert RunSettings(strategy="auto").over(RunSettings.from_env(launched)).strategy == "auto"


@pytest.mark.parametrize("wrong", ["", "  ", 3])
def test_a_strategy_is_a_name_whatever_it_names(wrong: object) -> None:
    with pytest.raises(ValueError, match=f"'ddp', 'fsdp', 'deepspeed', or the name of an installed one, got {wrong!r}"):
        RunSettings(strategy=wrong)  # type: ignore[arg-type]


def test_a_choice_of_no_or_nought_is_a_choice() -> None:
    chosen = RunSettings(cpu=False, seed=0).over(RunSettings("fp16", cpu=True, seed=7))
    assert (chosen.cpu, chosen.seed, chosen.mixed_precision) == (False, 0, "fp16")


@pytest.mark.parametrize("wrong", [{"batches": "halves"}, {"mixed_precision": "fp8"}])
def test_a_wrong_choice_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"must be one of .*, got '{next(iter(wrong.values()))}'"):
        RunSettings(**wrong)  # type: ignore[arg-type]
