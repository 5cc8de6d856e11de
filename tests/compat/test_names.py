"""Names of Accelerate: each is here, or its import fails in one sentence that says what to use instead."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import nbaccel
from nbaccel import Accelerator
from nbaccel.base.missing_names import _instead, _refusing
from nbaccel.testing import run_ranks

accelerate = pytest.importorskip("accelerate")


def _modules() -> list[str]:
    found = [found.name for found in pkgutil.walk_packages(accelerate.__path__, "accelerate.")]
    # `rich` raises where rich is not installed; commands and test_utils are absent as wholes.
    return ["accelerate", *(name for name in found if ".commands" not in name and ".test_utils" not in name)]


def _defined(module: Any) -> set[str]:
    """What programs import from there: what it defines, and what the packages show of their modules."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("accelerate")
        and (value.__module__ == module.__name__ or hasattr(module, "__path__"))
    }


@pytest.mark.parametrize("theirs", [name for name in _modules() if not name.endswith(".rich")])
def test_every_public_name_is_here_or_is_refused_with_what_to_use_instead(theirs: str) -> None:
    ours = theirs.replace("accelerate", "nbaccel", 1)
    importlib.import_module(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of theirs warn of being old
        names = _defined(importlib.import_module(theirs))
    wrong = []
    for name in sorted(names):
        try:
            exec(f"from {ours} import {name}", {})
        except ImportError as error:
            if str(error).partition(f"{ours} has no {name}: ")[2] == "":
                wrong.append(f"{name}: {error}")
    assert not wrong


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("from nbaccel import prepare_pippy", "nbaccel has no prepare_pippy: it works on models, whoever"),
        ("from nbaccel.utils import PrefixedDataset", "nbaccel.utils has no PrefixedDataset: it works on"),
        (
            "from nbaccel.hooks import attach_align_device_hook",
            "import it from accelerate, which may be installed beside",
        ),
        ("from nbaccel.checkpointing import save_accelerator_state", "use accelerator.save_state(folder), load_state"),
        ("from nbaccel.commands.launch import launch_command", "use `nbaccel launch` on the command line"),
        (
            "from nbaccel.tracking import register_tracker_class",
            "nbaccel.tracking has no register_tracker_class: hand an object",
        ),
        ("from nbaccel.test_utils.testing import require_cuda", "import it from accelerate"),
        ("from nbaccel.utils import nobody_knows_it", "module 'nbaccel.utils' has no attribute 'nobody_knows_it'"),
    ],
)
def test_an_import_that_fails_says_what_to_use_instead(statement: str, says: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    assert says in str(caught.value)


def test_attributes_are_missing_as_attributes_are() -> None:
    assert not hasattr(nbaccel.utils, "PrefixedDataset")
    assert not hasattr(nbaccel, "prepare_pippy")
    with pytest.raises(AttributeError, match=r"nbaccel\.hooks has no LayerwiseCastingHook: it works on"):
        nbaccel.hooks.LayerwiseCastingHook  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'nbaccel\.nobody_knows_it'"):
        importlib.import_module("nbaccel.nobody_knows_it")


def test_a_module_that_is_not_here_says_so_when_it_is_run() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "nbaccel.commands.launch", "train.py"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode != 0
    assert "use `nbaccel launch` on the command line" in run.stderr


def test_what_programs_use_under_a_flag_can_be_imported_and_refuses_to_be_used() -> None:
    from nbaccel import ParallelismConfig
    from nbaccel.utils import MegatronLMDummyScheduler, MegatronLMPlugin
    from nbaccel.utils.megatron_lm import MegatronLMDummyScheduler as TheSame

    assert MegatronLMDummyScheduler is TheSame
    optimizer = Accelerator().prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    assert not isinstance(optimizer, MegatronLMDummyScheduler)
    for refused in (ParallelismConfig, MegatronLMPlugin):
        with pytest.raises(NotImplementedError, match=r': it has no .* Accelerator\(strategy="fsdp"\), by which'):
            refused(tp_size=2)


def test_the_table_names_nothing_that_accelerate_does_not_know() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = {name for module in _modules() if not module.endswith(".rich") for name in
                 dir(importlib.import_module(module))}  # fmt: skip
    older = {"is_tpu_available", "MpDeviceLoaderWrapper", "launch_command", "launch_command_parser"}
    assert {*_instead(), *_refusing()} - known <= older
    assert not set(_instead()) & set(_refusing())


def test_constants_have_accelerates_values() -> None:
    theirs = importlib.import_module("accelerate.utils.constants")
    ours = importlib.import_module("nbaccel.utils.constants")
    assert {name: getattr(ours, name) for name in ours.__all__} == {
        name: getattr(theirs, name) for name in ours.__all__
    }
    from nbaccel.checkpointing import OPTIMIZER_NAME
    from nbaccel.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

    assert (WEIGHTS_NAME, SAFE_WEIGHTS_NAME) == ("pytorch_model.bin", "model.safetensors")
    assert OPTIMIZER_NAME == "optimizer"


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def _kinds() -> list[bool]:
    from nbaccel.data_loader import DataLoaderDispatcher, DataLoaderShard
    from nbaccel.optimizer import AcceleratedOptimizer
    from nbaccel.scheduler import AcceleratedScheduler

    model = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    data: Any = range(4)
    _, optimizer, scheduler, loader, stream = Accelerator().prepare(
        model, optimizer, scheduler, DataLoader(data), DataLoader(_Stream())
    )
    return [
        isinstance(optimizer, AcceleratedOptimizer),
        isinstance(scheduler, AcceleratedScheduler),
        isinstance(loader, DataLoaderShard) and not isinstance(loader, DataLoaderDispatcher),
        isinstance(stream, DataLoaderDispatcher) and not isinstance(stream, DataLoaderShard),
        isinstance(Accelerator().skip_first_batches(loader, 1), DataLoaderShard),
    ]


def test_prepared_objects_are_of_accelerates_classes() -> None:
    assert run_ranks(2, _kinds) == [[True] * 5] * 2


# -- keywords

_NOT_HERE = "what it configures is not here; see the compatibility page"
_DIFFERENCES = {
    "Accelerator": {
        "deepspeed_plugins": _NOT_HERE,
        "torch_tp_plugin": _NOT_HERE,
        "megatron_lm_plugin": _NOT_HERE,
        "parallelism_config": _NOT_HERE,
        "dynamo_plugin": "dynamo_backend, or torch.compile before or after prepare",
    },
    "state.AcceleratorState": {
        "dynamo_plugin": "the Accelerator compiles, not the state",
        "deepspeed_plugin": "the Accelerator's argument, not the state's",
        "fsdp_plugin": _NOT_HERE,
        "torch_tp_plugin": _NOT_HERE,
        "megatron_lm_plugin": _NOT_HERE,
        "parallelism_config": _NOT_HERE,
    },
    "state.GradientState": {"gradient_accumulation_plugin": "accelerator.gradient_state: each Accelerator has its own"},
}
"""Parameters of Accelerate's that ours do not have, on purpose, and why."""


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    called = function.__init__ if inspect.isclass(function) else function
    return {
        name: parameter
        for name, parameter in inspect.signature(called).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and name != "self"
        and not name.startswith("_")
    }


def _pairs() -> dict[str, tuple[Any, Any]]:
    """Every public function and class that both have under one name, and every method of these classes."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for place in ("", "data_loader", "launchers", "local_sgd", "logging", "state", "tracking", "utils"):
        theirs, ours = (
            importlib.import_module(f"{package}.{place}".rstrip(".")) for package in ("accelerate", "nbaccel")
        )
        for name in set(ours.__all__) & _defined(theirs):
            pairs[f"{place}.{name}".lstrip(".")] = getattr(theirs, name), getattr(ours, name)
    for label, (their_class, our_class) in list(pairs.items()):
        if inspect.isclass(their_class) and inspect.isclass(our_class):
            for name, value in vars(their_class).items():
                if not name.startswith("_") and callable(value) and callable(getattr(our_class, name, None)):
                    pairs[f"{label}.{name}"] = value, getattr(our_class, name)
    return pairs


def test_keywords_of_public_signatures_are_accelerates() -> None:
    missing: dict[str, set[str]] = {}
    for label, (their, our) in _pairs().items():
        try:
            theirs, ours = _parameters(their), _parameters(our)
        except (TypeError, ValueError):  # an enumeration, or built in
            continue
        if lacking := set(theirs) - set(ours):
            missing[label] = lacking
    assert {label: names for label, names in missing.items() if names - set(_DIFFERENCES.get(label, ()))} == {}


def test_what_is_given_by_its_place_is_taken_for_the_same() -> None:
    """Where Accelerate's first parameters may be given without their names; its constructor's are given by name."""
    moved = []
    for label, (their, our) in _pairs().items():
        if label in ("Accelerator", *_DIFFERENCES):
            continue
        try:
            theirs, ours = list(_parameters(their)), list(_parameters(our))
        except (TypeError, ValueError):
            continue
        moved += [
            f"{label}({name})" for place, name in enumerate(theirs) if ours[place : place + 1] not in ([name], [])
        ]
    assert not moved


def test_handlers_and_configurations_have_accelerates_fields() -> None:
    for name in nbaccel.utils.__all__:
        their, our = getattr(accelerate.utils, name, None), getattr(nbaccel.utils, name)
        if inspect.isclass(our) and dataclasses.is_dataclass(their):
            fields = {field.name for field in dataclasses.fields(their) if not field.name.startswith("_")}
            assert fields <= {field.name for field in dataclasses.fields(our)}, name
