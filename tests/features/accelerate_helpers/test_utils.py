"""The face of the utilities: what it shows, and the small ones."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import os
import sys
from typing import Any

import pytest
import torch

import nbaccel
import nbaccel.utils as utils
from nbaccel.testing import run_ranks


def test_all_is_sorted_and_is_all_there_is() -> None:
    assert utils.__all__ == sorted(utils.__all__)
    visible = {
        name
        for name, value in vars(utils).items()
        if not name.startswith("_")
        and name not in ("annotations", "missing_from", "shown_by")
        and not inspect.ismodule(value)
    }
    assert visible == set(utils.__all__)


def test_every_utility_says_what_it_is() -> None:
    assert not [name for name in utils.__all__ if not inspect.getdoc(getattr(utils, name))], "these have no docstring"


def test_the_face_of_the_states_shows_the_same_states() -> None:
    from nbaccel.state import AcceleratorState, GradientState, PartialState

    assert (AcceleratorState, PartialState) == (nbaccel.AcceleratorState, nbaccel.PartialState)
    assert isinstance(nbaccel.Accelerator().gradient_state, GradientState)


def test_names_that_both_faces_show_are_the_same_objects() -> None:
    for name in set(utils.__all__) & set(nbaccel.__all__):
        assert getattr(utils, name) is getattr(nbaccel, name), name


@pytest.mark.parametrize(
    "face", ["dataclasses", "environment", "imports", "memory", "operations", "other", "random", "versions"]
)
def test_programs_find_a_utility_where_accelerate_defines_it(face: str) -> None:
    theirs = pytest.importorskip(f"accelerate.utils.{face}")
    ours = importlib.import_module(f"nbaccel.utils.{face}")
    defined = {
        name for name in utils.__all__ if getattr(getattr(theirs, name, None), "__module__", "") == theirs.__name__
    }
    assert defined <= set(ours.__all__)
    assert all(getattr(ours, name) is getattr(utils, name) for name in ours.__all__)


def test_the_launchers_are_found_where_accelerate_has_them() -> None:
    from nbaccel.launchers import debug_launcher, notebook_launcher

    assert (debug_launcher, notebook_launcher) == (nbaccel.debug_launcher, nbaccel.notebook_launcher)


def test_versions_are_compared_as_versions() -> None:
    assert utils.is_torch_version("<", "10.0")  # as texts, 2.13 and 10.0 stand the other way round
    assert utils.is_torch_version("==", torch.__version__.partition("+")[0])
    assert utils.compare_versions("1.9", "!=", "1.10")
    assert utils.compare_versions("torch", ">", "1.13.1")
    relations = ("<", "<=", "==", "!=", ">=", ">")
    for other, true in (("1.9", "!= >= >"), ("1.10", "<= == >="), ("1.11", "< <= !=")):
        assert [each for each in relations if utils.compare_versions("1.10", each, other)] == true.split()
    with pytest.raises(ValueError, match="operation must be one of >, >=, ==, !=, <=, <, got '=~'"):
        utils.compare_versions("torch", "=~", "2.0")


def test_the_environment_is_empty_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBACCEL_THERE", "before")
    with utils.clear_environment():
        assert not os.environ
        os.environ["NBACCEL_NEW"] = "x"
    assert os.environ["NBACCEL_THERE"] == "before"
    assert "NBACCEL_NEW" not in os.environ


def test_a_compiled_module_is_known() -> None:
    layer = torch.nn.Linear(1, 1)
    assert not utils.is_compiled_module(layer)
    assert utils.is_compiled_module(torch.compile(layer, backend="eager"))


def test_variables_of_the_environment_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBACCEL_THERE", "before")
    with pytest.raises(ZeroDivisionError), utils.patch_environment(nbaccel_there=1, nbaccel_new="x"):
        assert (os.environ["NBACCEL_THERE"], os.environ["NBACCEL_NEW"]) == ("1", "x")
        raise ZeroDivisionError
    assert os.environ["NBACCEL_THERE"] == "before"
    assert "NBACCEL_NEW" not in os.environ


def test_one_bar_is_shown_for_all_ranks() -> None:
    def shown(main_process_only: bool) -> bool:
        bar = utils.tqdm(range(3), main_process_only=main_process_only, file=io.StringIO())
        is_shown = not bar.disable
        assert list(bar) == [0, 1, 2]
        return is_shown

    assert run_ranks(2, shown, True) == [True, False]
    assert run_ranks(2, shown, False) == [True, True]


@pytest.mark.parametrize(
    ("is_available", "package"),
    [
        (utils.is_bnb_available, "bitsandbytes"),
        (utils.is_datasets_available, "datasets"),
        (utils.is_deepspeed_available, "deepspeed"),
        (utils.is_mlflow_available, "mlflow"),
        (utils.is_peft_available, "peft"),
        (utils.is_tensorboard_available, "tensorboard"),
        (utils.is_transformers_available, "transformers"),
        (utils.is_matplotlib_available, "matplotlib"),
        (utils.is_pandas_available, "pandas"),
        (utils.is_rich_available, "rich"),
        (utils.is_torchvision_available, "torchvision"),
        (utils.is_wandb_available, "wandb"),
    ],
)
def test_packages_are_found_without_being_imported(is_available: Any, package: str) -> None:
    was_imported = package in sys.modules
    assert is_available() == (importlib.util.find_spec(package) is not None)
    assert (package in sys.modules) == was_imported


def test_devices_are_asked_of_torch() -> None:
    assert utils.is_cuda_available() == torch.cuda.is_available()
    assert utils.is_mps_available() == torch.backends.mps.is_available()
    assert utils.is_xpu_available() == torch.xpu.is_available()
    assert utils.is_npu_available() is False
    assert utils.is_torch_xla_available() == (importlib.util.find_spec("torch_xla") is not None)
    if not torch.cuda.is_available():
        assert utils.is_bf16_available()


def test_a_model_comes_out_of_what_is_around_it() -> None:
    def unwrapped() -> list[bool]:
        layer = torch.nn.Linear(2, 2)
        accelerator = nbaccel.Accelerator(mixed_precision="bf16")
        model = accelerator.prepare(layer)
        compiled = torch.compile(model, backend="eager")
        kept = utils.extract_model_from_parallel(compiled)
        return [
            utils.extract_model_from_parallel(model) is layer,
            utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is layer,
            hasattr(kept, "_orig_mod") and kept._orig_mod is layer,
            "forward" in vars(utils.extract_model_from_parallel(model)),
            "forward" in vars(utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)),
        ]

    assert run_ranks(2, unwrapped) == [[True, True, True, True, False]] * 2
    layer = torch.nn.Linear(2, 2)
    assert utils.extract_model_from_parallel(torch.nn.DataParallel(layer)) is layer


def test_memory_is_released_and_names_are_given_none() -> None:
    import weakref

    layer: Any = torch.nn.Linear(2, 2)
    alive = weakref.ref(layer)
    layer, other = utils.release_memory(layer, 3)
    assert (layer, other) == (None, None)
    assert alive() is None


def test_the_names_of_precisions_are_strings() -> None:
    assert utils.PrecisionType.list() == ["no", "fp16", "bf16"]
    assert nbaccel.Accelerator(mixed_precision=utils.PrecisionType.BF16).mixed_precision == "bf16"
    assert next(iter(utils.LoggerType)) == "all"


def test_small_helpers_do_what_accelerates_do(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("accelerate.utils")
    environment = importlib.import_module("nbaccel.utils.environment")
    monkeypatch.setenv("NBACCEL_THERE", "-3")
    monkeypatch.setenv("NBACCEL_NEXT", "4")
    keys = ("NBACCEL_THERE", "NBACCEL_NONE", "NBACCEL_NEXT")
    for ours in (environment, theirs):
        assert ours.get_int_from_env(keys, 7) == 4
        assert ours.get_int_from_env(keys[:2], 7) == 7
        assert ours.parse_flag_from_env("NBACCEL_NONE", True) is True
        assert ours.parse_choice_from_env("NBACCEL_NEXT") == "4"
        assert [ours.str_to_bool(word) for word in ("Yes", "off")] == [1, 0]
    batch = {"x": [torch.arange(3)], "name": "a"}
    for name, arguments in {
        "find_device": [batch],
        "is_peft_model": [torch.nn.Linear(1, 1)],
        "merge_dicts": [{"a": {"x": 1}}, {"a": {"y": 2}}],
        "convert_bytes": [3.5 * 2**30],
        "get_pretty_name": [torch.nn.Linear],
    }.items():
        assert getattr(utils, name)(*arguments) == getattr(theirs, name)(*arguments), name
    # Theirs fills zeros in, where its documentation says the last row.
    assert utils.pad_input_tensors(torch.arange(3), 3, 4).tolist() == [0, 1, 2, 2]
    tied = torch.ones(2)
    assert list(utils.clean_state_dict_for_safetensors({"a": tied, "b": tied, "c": torch.ones(2)})) == ["a", "c"]
    assert utils.should_reduce_batch_size(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    assert not utils.should_reduce_batch_size(ValueError("no"))
    assert utils.is_pytest_available()
    assert not utils.is_hpu_available()
    with utils.get_mixed_precision_context_manager(), utils.GatheredParameters([]):
        assert not utils.get_grad_scaler(enabled=False).is_enabled()


def test_a_test_leaves_no_variable_of_accelerates_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "before")

    @utils.purge_accelerate_environment
    class Parent:
        def test_one(self) -> None:
            os.environ["ACCELERATE_LEFT"] = "1"
            os.environ["ACCELERATE_KEPT"] = "changed"

    class Child(Parent):
        def test_two(self) -> None:
            os.environ["ACCELERATE_LEFT"] = "2"

    for test in (Child().test_one, Child().test_two):
        test()
        assert "ACCELERATE_LEFT" not in os.environ
        assert os.environ["ACCELERATE_KEPT"] == "before"
