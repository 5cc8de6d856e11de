"""The options of the strategy "fsdp", and who chooses a strategy: the program, its launch, or nobody."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.utils import (
    FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)

Plugin = FullyShardedDataParallelPlugin


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "FSDP" in name or name == "NBACCEL_STRATEGY"]:
        monkeypatch.delenv(name)


def test_it_has_the_fields_of_accelerates_in_their_order() -> None:
    theirs = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin
    ours = [field.name for field in dataclasses.fields(Plugin) if field.init]
    assert ours == [field.name for field in dataclasses.fields(theirs)]


def test_what_nobody_chose_is_full_sharding_by_what_the_model_is() -> None:
    plugin = Plugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_offload) == (2, True, False)
    assert (plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap) == ("auto", None)
    assert (plugin.mixed_precision_policy, plugin.ignored_modules) == (None, None)
    assert plugin.state_dict_type == "SHARDED_STATE_DICT"
    assert plugin.min_num_params == 0
    assert Plugin(auto_wrap_policy="SIZE_BASED_WRAP").min_num_params == 100_000_000
    assert not plugin.activation_checkpointing
    assert not plugin.cpu_ram_efficient_loading


@pytest.mark.parametrize("chosen", ["FULL_SHARD", "full_shard", 1, "1", ShardingStrategy.FULL_SHARD])
def test_full_sharding_of_fsdp1_frees_parameters_after_the_forward(chosen: Any) -> None:
    assert Plugin(sharding_strategy=chosen).reshard_after_forward is True


@pytest.mark.parametrize("chosen", ["SHARD_GRAD_OP", "shard_grad_op", 2, "2", ShardingStrategy.SHARD_GRAD_OP])
def test_sharding_of_gradients_of_fsdp1_keeps_them(chosen: Any) -> None:
    assert Plugin(sharding_strategy=chosen).reshard_after_forward is False
    assert Plugin(reshard_after_forward=chosen).reshard_after_forward is False


@pytest.mark.parametrize(("chosen", "is_freed"), [(True, True), (False, False), ("true", True), ("no", False)])
def test_both_words_may_be_said_and_that_of_fsdp2_counts(chosen: Any, is_freed: bool) -> None:
    other = "SHARD_GRAD_OP" if is_freed else "FULL_SHARD"
    assert Plugin(reshard_after_forward=chosen, sharding_strategy=other).reshard_after_forward is is_freed


@pytest.mark.parametrize("chosen", ["NO_SHARD", 3, ShardingStrategy.NO_SHARD])
def test_no_sharding_is_another_strategy(chosen: Any) -> None:
    with pytest.raises(ValueError, match=r'whole on every rank: use Accelerator\(strategy="ddp"\)$'):
        Plugin(sharding_strategy=chosen)


@pytest.mark.parametrize("chosen", ["HYBRID_SHARD", 4, 5, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_hybrid_sharding_is_refused_with_what_works(chosen: Any) -> None:
    with pytest.raises(ValueError, match=r"is not here: use 'FULL_SHARD' or 'SHARD_GRAD_OP', which shard over all"):
        Plugin(sharding_strategy=chosen)


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("chosen", "policy"),
    [
        ("bf16", HALF),
        (HALF, HALF),
        ({"param_dtype": torch.float16}, MixedPrecisionPolicy(torch.float16)),
        ({"reduce_dtype": None, "cast_forward_inputs": False}, MixedPrecisionPolicy(cast_forward_inputs=False)),
        (MixedPrecision(torch.float16, torch.float32), MixedPrecisionPolicy(torch.float16, torch.float32)),
    ],
    ids=["name", "policy", "dictionary", "part", "of FSDP1"],
)
def test_a_precision_of_any_form_is_torchs_policy(chosen: Any, policy: MixedPrecisionPolicy) -> None:
    assert Plugin(mixed_precision_policy=chosen).mixed_precision_policy == policy


def test_a_precision_may_be_set_later_unless_the_program_gave_one() -> None:
    plugin = Plugin()
    plugin.set_mixed_precision(torch.bfloat16)
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy == HALF
    plugin.set_mixed_precision("fp32", override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.float32


@pytest.mark.parametrize(
    ("chosen", "is_offloaded"),
    [(True, True), ("false", False), (CPUOffload(True), True), (CPUOffload(), False), (CPUOffloadPolicy(), True),
     (OffloadPolicy(), False)],
)  # fmt: skip
def test_offloading_of_any_form_is_true_or_false(chosen: Any, is_offloaded: bool) -> None:
    assert Plugin(cpu_offload=chosen).cpu_offload is is_offloaded


@pytest.mark.parametrize(
    "chosen", ["FULL_STATE_DICT", "full_state_dict", 1, "1", StateDictType.FULL_STATE_DICT]
)  # fmt: skip
def test_a_state_of_any_form_is_its_name_also_later(chosen: Any) -> None:
    assert Plugin(state_dict_type=chosen).state_dict_type == "FULL_STATE_DICT"
    plugin = Plugin(state_dict_type=StateDictType.SHARDED_STATE_DICT)
    plugin.set_state_dict_type()
    assert plugin.state_dict_type == "SHARDED_STATE_DICT"
    plugin.set_state_dict_type(chosen)
    assert plugin.state_dict_type == "FULL_STATE_DICT"


def test_an_option_of_one_policy_alone_asks_for_that_policy() -> None:
    named = Plugin(transformer_cls_names_to_wrap=["Block", torch.nn.Linear])
    assert (named.auto_wrap_policy, named.transformer_cls_names_to_wrap) == (
        "transformer_based_wrap",
        ["Block", "Linear"],
    )
    sized = Plugin(min_num_params=1000)
    assert (sized.auto_wrap_policy, sized.min_num_params) == ("size_based_wrap", 1000)
    both = Plugin(auto_wrap_policy="NO_WRAP", min_num_params=1000)
    assert both.auto_wrap_policy == "no_wrap"


def test_policies_of_torch_and_functions_of_a_module_are_policies() -> None:
    assert Plugin(auto_wrap_policy=transformer_auto_wrap_policy).auto_wrap_policy == "transformer_based_wrap"
    whole = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear})
    assert Plugin(auto_wrap_policy=whole).auto_wrap_policy is whole

    def is_linear(module: torch.nn.Module) -> bool:
        return isinstance(module, torch.nn.Linear)

    assert Plugin(auto_wrap_policy=is_linear).auto_wrap_policy is is_linear


def test_ignored_modules_may_be_iterated_several_times() -> None:
    layers = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    plugin = Plugin(ignored_modules=iter(layers))
    assert plugin.ignored_modules == tuple(layers)
    assert Plugin(ignored_modules=r"encoder\..*").ignored_modules == r"encoder\..*"


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"fsdp_version": 3}, ValueError, "fsdp_version must be 1 or 2, and 2 is what runs; got 3"),
        ({"sharding_strategy": "HALF"}, ValueError, "must be 'FULL_SHARD' or 'SHARD_GRAD_OP', got 'HALF'"),
        ({"reshard_after_forward": 7}, ValueError, "must be True or False, or 'FULL_SHARD' or 'SHARD_GRAD_OP', got 7"),
        ({"auto_wrap_policy": "blocks"}, ValueError, "'transformer_based_wrap', 'size_based_wrap' or 'no_wrap', or a"),
        ({"auto_wrap_policy": 3}, TypeError, "'size_based_wrap' or 'no_wrap', or a function of a module, got 3"),
        ({"mixed_precision_policy": "fp8"}, ValueError, "'fp16', 'bf16' or 'fp32', got 'fp8'; 8-bit training is not"),
        ({"mixed_precision_policy": {"dtype": torch.half}}, ValueError, "no field 'dtype': its fields are param_dtype"),
        ({"mixed_precision_policy": {"param_dtype": "bf16"}}, TypeError, "param_dtype must be a torch.dtype, got 'bf"),
        ({"mixed_precision_policy": 3}, TypeError, "must be a MixedPrecisionPolicy of torch.distributed.fsdp, a dict"),
        ({"cpu_offload": "maybe"}, ValueError, "cpu_offload must be True or False, got 'maybe'"),
        ({"activation_checkpointing": 3}, ValueError, "activation_checkpointing must be True or False, got 3"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, ValueError, "'FULL_STATE_DICT', got 'LOCAL_STATE_DICT'; FSDP2 has"),
        ({"ignored_modules": [3]}, TypeError, "must be modules, or a regular expression for their names, got 3"),
        ({"transformer_cls_names_to_wrap": [3]}, TypeError, "transformer_cls_names_to_wrap must be names of classes"),
        ({"min_num_params": -1}, ValueError, "min_num_params must be a whole number from 0 on, got -1"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_sentence_with_the_choices(
    wrong: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        Plugin(**wrong)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


# -- what has no effect


def _warnings(make: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(each.message) for each in caught]


def test_one_warning_names_every_option_without_effect_once() -> None:
    def make() -> None:
        plugin = Plugin(
            fsdp_version=1, backward_prefetch=BackwardPrefetch.BACKWARD_PRE, use_orig_params=True,
            param_init_fn=print, sync_module_states=True, forward_prefetch=False, limit_all_gathers=False,
            activation_checkpointing_offload=True, mixed_precision_policy=MixedPrecision(buffer_dtype=torch.half),
        )  # fmt: skip
        Accelerator(fsdp_plugin=plugin)
        plugin.__post_init__()

    assert _warnings(make) == [
        "FullyShardedDataParallelPlugin: backward_prefetch, use_orig_params, param_init_fn, sync_module_states, "
        "forward_prefetch, limit_all_gathers, mixed_precision_policy's buffer_dtype, activation_checkpointing_offload "
        "have no effect: FSDP2 has no such option, or does it in any case. fsdp_version=1 was asked for, and FSDP2 is "
        "what runs."
    ]


def test_what_has_an_effect_is_not_warned_of() -> None:
    assert not _warnings(lambda: Plugin(2, "SHARD_GRAD_OP", cpu_offload=True, auto_wrap_policy="no_wrap"))
    assert _warnings(lambda: Plugin(forward_prefetch=True)) == [
        "FullyShardedDataParallelPlugin: forward_prefetch has no effect: FSDP2 has no such option, or does it in any "
        "case."
    ]


def test_the_warning_points_at_the_programs_line() -> None:
    with pytest.warns(UserWarning, match="use_orig_params") as caught:
        Plugin(use_orig_params=True)
    assert caught[0].filename == __file__


# -- the environment


def test_what_the_program_left_open_is_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "RESHARD_AFTER_FORWARD": "false", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "MIN_NUM_PARAMS": "100",
        "TRANSFORMER_CLS_TO_WRAP": "Block, Head", "OFFLOAD_PARAMS": "true", "ACTIVATION_CHECKPOINTING": "True",
        "CPU_RAM_EFFICIENT_LOADING": "true", "STATE_DICT_TYPE": "FULL_STATE_DICT", "IGNORED_MODULES": "head.*",
        "VERSION": "2",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    plugin = Plugin()
    assert plugin.reshard_after_forward is False
    assert plugin.cpu_offload is plugin.activation_checkpointing is plugin.cpu_ram_efficient_loading is True
    assert plugin.auto_wrap_policy == "transformer_based_wrap"
    assert Plugin(auto_wrap_policy="size_based_wrap").min_num_params == 100
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Head"]
    assert (plugin.state_dict_type, plugin.ignored_modules) == ("FULL_STATE_DICT", "head.*")
    own = Plugin(reshard_after_forward=True, cpu_offload=False, auto_wrap_policy="no_wrap", ignored_modules=[])
    assert own.reshard_after_forward is True
    assert own.cpu_offload is False
    assert (own.auto_wrap_policy, own.ignored_modules) == ("no_wrap", ())


def test_of_the_two_variables_for_sharding_the_one_of_the_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's launcher sets both, one of them to its default."""
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    assert Plugin().reshard_after_forward is False
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    assert Plugin().reshard_after_forward is True
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.warns(UserWarning, match="fsdp_version=1 was asked for, and FSDP2 is what runs"):
        assert Plugin().reshard_after_forward is False


def test_variables_that_ask_for_what_happens_anyway_are_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's launcher and transformers set them always."""
    usual = {"USE_ORIG_PARAMS": "true", "SYNC_MODULE_STATES": "True", "FORWARD_PREFETCH": "false"}
    for name, value in (usual | {"BACKWARD_PREFETCH": "BACKWARD_PRE", "AUTO_WRAP_POLICY": "None"}).items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    assert not _warnings(Plugin)
    monkeypatch.setenv("FSDP_FORWARD_PREFETCH", "true")
    assert "FSDP_FORWARD_PREFETCH=true has no effect" in _warnings(Plugin)[0]


def test_transformers_is_told_of_loading_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "false")
    Plugin(cpu_ram_efficient_loading=True)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    disable_fsdp_ram_efficient_loading()
    assert not Plugin().cpu_ram_efficient_loading
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    enable_fsdp_ram_efficient_loading()
    assert Plugin().cpu_ram_efficient_loading
    assert os.environ["ACCELERATE_USE_FSDP"] == "True"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "")  # for the fixture to take back


def test_a_plugin_can_be_copied_and_sent() -> None:
    plugin = Plugin(mixed_precision_policy="bf16", auto_wrap_policy=_is_linear, ignored_modules="head")
    for again in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert again == plugin


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


# -- who chooses


def _chosen(*arguments: Any, ranks: int = 2, **choices: Any) -> tuple[Any, Any]:
    """Return the strategy, and its options, with which an Accelerator is equipped in ranks; None for its defaults."""

    def rank() -> tuple[Any, Any]:
        from nbaccel.train.prepare import training_context as context
        from nbaccel.train.strategies import choose_strategy

        seen: list[Any] = []

        def choose(world: Any, device: Any, name: Any, handlers: Any, plugin: Any) -> Any:
            seen.append((name, plugin))
            return choose_strategy(world, device)

        context.choose_strategy = choose  # type: ignore[attr-defined]  # this process ends with the function
        Accelerator(*arguments, **choices).prepare(torch.nn.Linear(1, 1))
        (found,) = seen
        return found

    first, *others = run_ranks(ranks, rank)
    assert all(other == first for other in others)
    return first


def test_a_program_chooses_by_name_or_by_the_plugin() -> None:
    assert _chosen() == (None, None)
    assert _chosen(strategy="ddp") == ("ddp", None)
    assert _chosen(strategy="fsdp") == ("fsdp", Plugin())
    plugin = Plugin(reshard_after_forward=False)
    assert _chosen(fsdp_plugin=plugin) == ("fsdp", plugin)
    assert _chosen(fsdp_plugin=plugin, strategy="fsdp") == ("fsdp", plugin)


def test_a_program_beats_its_launch_and_the_launch_beats_accelerates_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert _chosen() == ("fsdp", Plugin(reshard_after_forward=False))
    monkeypatch.setenv("NBACCEL_STRATEGY", "ddp")
    assert _chosen() == ("ddp", None)
    assert _chosen(strategy="auto") == ("auto", None)
    plugin = Plugin(reshard_after_forward=True)
    assert _chosen(fsdp_plugin=plugin) == ("fsdp", plugin)


def test_fields_may_be_assigned_until_an_accelerator_is_made() -> None:
    plugin = Plugin()
    plugin.transformer_cls_names_to_wrap = "Block"
    plugin.cpu_offload = "true"
    plugin.sharding_strategy = "SHARD_GRAD_OP"
    _, found = _chosen(fsdp_plugin=plugin)
    assert (found.transformer_cls_names_to_wrap, found.cpu_offload) == (["Block"], True)
    assert (found.auto_wrap_policy, found.reshard_after_forward) == ("transformer_based_wrap", False)
    plugin = Plugin()
    plugin.min_num_params = 1000
    assert _chosen(fsdp_plugin=plugin)[1].auto_wrap_policy == "size_based_wrap"


def test_one_process_has_nothing_to_shard_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(strategy="fsdp")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert capsys.readouterr().out == (
        'strategy="fsdp": one process has nothing to shard over, so it holds the whole model.\n'
    )


def test_a_plugin_beside_another_strategy_or_of_another_library_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"strategy='ddp' and a plugin, fsdp_plugin, which is for strategy=\"fsdp\": leave"
    ):
        Accelerator(strategy="ddp", fsdp_plugin=Plugin())
    with pytest.raises(
        TypeError, match=r"fsdp_plugin takes a FullyShardedDataParallelPlugin of .*, got builtins\.dict"
    ):
        Accelerator(fsdp_plugin={})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"strategy must be one of 'auto', 'single', 'ddp', 'fsdp', 'deepspeed', or the name of an"
    ):
        Accelerator(strategy=" ")
    with pytest.raises(ValueError, match="strategy must be one of"):
        Accelerator(strategy=torch.nn.Linear)  # type: ignore[arg-type]


def test_a_strategy_that_nobody_knows_is_refused_where_it_is_looked_up() -> None:
    with pytest.raises(ValueError, match=r"strategy must be one of 'auto', 'single', 'ddp'.* got 'zero'"):
        Accelerator(strategy="zero").prepare(torch.nn.Linear(1, 1))
