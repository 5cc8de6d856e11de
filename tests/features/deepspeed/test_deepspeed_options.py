"""Options of the strategy "deepspeed": what they mean and what they refuse, without the package deepspeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator, DeepSpeedPlugin
from nbaccel.base.settings import PARTITIONING, RunSettings
from nbaccel.features import named
from nbaccel.features.deepspeed.ds_config import filled
from nbaccel.features.deepspeed.facts import Facts
from nbaccel.utils import DummyOptim, DummyScheduler, HfDeepSpeedConfig

CPU = torch.device("cpu")
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
}


def _facts(**changes: Any) -> Facts:
    optimizer = {"lr": 0.5, "betas": [0.9, 0.99], "weight_decay": 0.0}
    schedule = {"warmup_num_steps": 7, "warmup_max_lr": 0.5}
    return Facts(**{"is_dummy": True, "optimizer": optimizer, "schedule": schedule, "hidden_size": 64, **changes})


def test_the_table_of_features_has_every_strategy_that_cuts_a_training() -> None:
    assert named("--strategy ") == PARTITIONING


def test_every_auto_is_filled_from_loader_optimizer_schedule_and_precision() -> None:
    config = filled(DeepSpeedPlugin(AUTO), "bf16", 8, 4, 1, _facts())
    assert "auto" not in json.dumps(config)
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (8, 32)
    assert config["gradient_accumulation_steps"] == 1  # windows are counted by the Accelerator
    assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert config["optimizer"]["params"] == {"lr": 0.5, "betas": [0.9, 0.99], "weight_decay": 0.0}
    assert config["scheduler"]["params"] == {"warmup_num_steps": 7, "warmup_max_lr": 0.5}
    assert config["zero_optimization"]["reduce_bucket_size"] == 64 * 64
    assert AUTO["bf16"] == {"enabled": "auto"}  # the program's dictionary stays as it is


@pytest.mark.parametrize(
    ("changes", "facts", "says"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, {}, "is 4, and the first loader has batches of 8 per rank"),
        ({}, {"is_dummy": False}, r"has an optimizer \(AdamW\), and the program prepares one of its own"),
        ({"optimizer": None}, {}, "prepares DummyOptim, and it has no optimizer"),
        ({}, {"schedule": None}, r"has a scheduler \(WarmupLR\), and the program prepares no DummyScheduler"),
        ({"scheduler": None}, {"needs_schedule": True}, "prepares DummyScheduler without lr_scheduler_callable"),
        ({"train_batch_size": 999}, {}, "is 999, and 8 samples per rank x 2 ranks x 4 batches per step are 64"),
        ({"wall_clock": {"limit": "auto"}}, {}, r'has "auto" where nothing here says a value: wall_clock\.limit'),
    ],
)
def test_each_contradiction_of_configuration_and_program_is_named(
    changes: dict[str, Any], facts: dict[str, Any], says: str
) -> None:
    config = {name: value for name, value in {**AUTO, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=says):
        filled(DeepSpeedPlugin(config), "no", 8, 2, 4, _facts(**facts))


def test_a_configuration_without_a_batch_size_is_filled_also_where_no_loader_says_one() -> None:
    assert filled(DeepSpeedPlugin(), "no", None, 2, 1, Facts())["train_batch_size"] == 2


@pytest.mark.parametrize(("ranks", "steps"), [(1, 18), (2, 9), (4, 5), (0, 18)])
def test_the_steps_of_a_schedule_are_those_that_the_engine_takes(ranks: int, steps: int) -> None:
    optimizer = DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=18, warmup_num_steps=2)
    told = Facts.of(torch.nn.Linear(1, 1), optimizer, schedule, ranks).schedule
    assert told is not None
    assert (told["total_num_steps"], told["warmup_num_steps"]) == (steps, 2)  # as Accelerate has it


@pytest.mark.parametrize(("batch_size", "wanted"), [(4, 4), (None, 4)])
def test_a_total_batch_size_needs_no_other_number(batch_size: int | None, wanted: int) -> None:
    config = filled(DeepSpeedPlugin({"train_batch_size": 24}), "no", batch_size, 2, 3, Facts())
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (wanted, 8)  # windows are ours


def test_a_total_batch_size_that_ranks_and_windows_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="train_batch_size is 25, which 2 ranks x 3 batches per step do not divide"):
        filled(DeepSpeedPlugin({"train_batch_size": 25}), "no", None, 2, 3, Facts())


def test_all_contradictions_are_in_one_error() -> None:
    with pytest.raises(ValueError, match=r"batches of 8 per rank; it has an optimizer .* per step|; .*; ") as caught:
        config = {**AUTO, "train_micro_batch_size_per_gpu": 4}
        filled(DeepSpeedPlugin(config), "no", 8, 2, 1, _facts(is_dummy=False, schedule=None))
    assert str(caught.value).count(";") == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"zero_stage": 0}, "zero_stage must be 1, 2 or 3, got 0: 0 keeps everything on every rank"),
        ({"zero_stage": "two"}, "zero_stage must be a whole number, got 'two'"),
        ({"zero_stage": 2, "hf_ds_config": {"zero_optimization": {"stage": 3}}}, "says stage: 3: give one of them"),
        ({"offload_param_device": "cpu"}, "is for zero_stage=3, which cuts parameters, and the stage is 2"),
        ({"offload_optimizer_device": "disk"}, "offload_optimizer_device must be none, cpu or nvme, got 'disk'"),
        ({"offload_optimizer_device": "nvme"}, "needs offload_optimizer_nvme_path"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"gradient_clipping": "x"}, "gradient_clipping must be a norm, 0 for none, got 'x'"),
        ({"hf_ds_config": {"zero_optimization": None}}, "says zero_optimization: null, and it must be a table"),
        (
            {"hf_ds_config": {"zero_optimization": {"offload_optimizer": "cpu"}}},
            'says zero_optimization.offload_optimizer: "cpu", and it must be a table',
        ),
        ({"hf_ds_config": {"bf16": True}}, "says bf16: true, and it must be a table"),
        ({"hf_ds_config": "no/such.json"}, "the DeepSpeed configuration no/such.json cannot be read"),
    ],
)
def test_a_plugin_refuses_what_cannot_be(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DeepSpeedPlugin(**fields)


def test_a_plugin_follows_what_accelerate_launch_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.offload_param_device) == (3, 0.5, "cpu")
    assert plugin.deepspeed_config["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert RunSettings.from_env().strategy == "deepspeed"


def test_the_precision_is_that_of_one_side_or_of_both() -> None:
    plugin = DeepSpeedPlugin({"bf16": {"enabled": True}})
    assert [plugin.precision_of(name) for name in ("no", "bf16")] == ["bf16", "bf16"]
    with pytest.raises(ValueError, match="mixed_precision='fp16', and the DeepSpeed configuration enables bf16"):
        plugin.precision_of("fp16")


def test_a_precision_that_the_configuration_switches_off_is_refused() -> None:
    plugin = DeepSpeedPlugin({"bf16": {"enabled": False}})
    assert [plugin.precision_of(name) for name in ("no", "fp16")] == ["no", "fp16"]
    with pytest.raises(ValueError, match=r"mixed_precision='bf16', and the DeepSpeed .* says bf16\.enabled: false"):
        plugin.precision_of("bf16")


def test_the_precision_of_the_configuration_is_the_accelerators() -> None:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin({"bf16": {"enabled": True}}), cpu=True)
    assert (accelerator.mixed_precision, accelerator.state.mixed_precision) == ("bf16", "bf16")


@pytest.fixture
def _by_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration with windows of 4 batches that `accelerate launch` has given."""
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"gradient_accumulation_steps": 4, "bf16": {"enabled": True}}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))


@pytest.mark.usefixtures("_by_launch")
def test_the_windows_of_a_launchs_configuration_are_the_accelerators() -> None:
    accelerator = Accelerator(cpu=True)
    assert (accelerator.gradient_accumulation_steps, accelerator.mixed_precision) == (4, "bf16")
    accelerator.gradient_accumulation_steps = 3  # the program's own word
    assert accelerator.gradient_accumulation_steps == 3


@pytest.mark.usefixtures("_by_launch")
def test_windows_of_a_program_that_a_launchs_configuration_contradicts_are_refused() -> None:
    with pytest.raises(ValueError, match="=2, and the configuration of deepspeed says 4: give one of them"):
        Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_fields_that_are_assigned_until_a_model_is_prepared_hold() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2)
    plugin.zero_stage, plugin.gradient_clipping, plugin.offload_optimizer_device = 3, 0.5, "cpu"
    plugin.__post_init__()  # as an Accelerator calls it
    config = filled(plugin, "no", 8, 2, 1, Facts())
    assert (config["zero_optimization"]["stage"], config["gradient_clipping"]) == (3, 0.5)
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    plugin.offload_optimizer_device = "none"
    plugin.__post_init__()
    assert "offload_optimizer" not in filled(plugin, "no", 8, 2, 1, Facts())["zero_optimization"]
    assert plugin.zero_stage == 3


def test_what_a_program_writes_into_the_configuration_holds_and_may_not_contradict_a_field() -> None:
    plugin = DeepSpeedPlugin()
    plugin.deepspeed_config["zero_optimization"]["stage"] = 3
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
    plugin.__post_init__()
    assert plugin.zero_stage == 3
    assert filled(plugin, "no", None, 2, 1, Facts())["train_micro_batch_size_per_gpu"] == 4
    plugin.zero_stage = 1
    with pytest.raises(ValueError, match=r"zero_stage=1\), and the DeepSpeed configuration says stage: 3"):
        plugin.__post_init__()


def test_windows_that_are_assigned_too_late_are_refused_with_the_attribute_that_sets_them() -> None:
    plugin = DeepSpeedPlugin()
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True)
    plugin.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match=r"assign accelerator\.gradient_accumulation_steps = 4 in its place"):
        accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.gradient_accumulation_steps = 4
    accelerator.prepare(torch.nn.Linear(1, 1))


def test_the_steps_of_a_window_are_said_once() -> None:
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=4)
    assert Accelerator(deepspeed_plugin=plugin, cpu=True).gradient_accumulation_steps == 4
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2, and the deepspeed_plugin says 4"):
        Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)


def test_a_plugin_chooses_its_strategy_and_no_other() -> None:
    plugin = DeepSpeedPlugin(zero_stage=1)
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True)
    assert accelerator.deepspeed_plugin is accelerator.state.deepspeed_plugin is plugin
    assert str(accelerator.distributed_type) == "DEEPSPEED"
    assert Accelerator(cpu=True).deepspeed_plugin is None
    with pytest.raises(ValueError, match=r"strategy='ddp' and a plugin, deepspeed_plugin, which is for"):
        Accelerator(strategy="ddp", deepspeed_plugin=plugin)
    with pytest.raises(TypeError, match=r"deepspeed_plugin takes a DeepSpeedPlugin of nbaccel\.utils, got builtins"):
        Accelerator(deepspeed_plugin=object())


def test_a_configuration_answers_questions() -> None:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert (config.is_zero3(), config.is_zero2(), config.is_offload()) == (True, False, True)
    assert config.get_value("zero_optimization.stage") == 3
    assert config.get_value("fp16.enabled", "none") == "none"
    assert not config.is_true("fp16.enabled")
    assert not config.is_false("fp16.enabled")
    config.del_config_sub_tree("zero_optimization.offload_param")
    assert config.config == {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=r"has no fp16\.enabled"):
        config.del_config_sub_tree("fp16.enabled", must_exist=True)


def test_placeholders_wait_for_the_engine() -> None:
    optimizer = DummyOptim(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    assert DummyScheduler(optimizer, total_num_steps=5).get_last_lr() == [0.1]
    with pytest.raises(RuntimeError, match="DummyOptim steps nothing by itself"):
        optimizer.step()
