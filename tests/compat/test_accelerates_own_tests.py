"""The scripts by which Accelerate tests itself, as installed, with one word changed: `accelerate` to `nbaccel`.

Each of their checks is right here, or `DIFFERENT` names it with the reason. `accelerate.test_utils` has models and data
for them, and stays Accelerate's; what there talks to other ranks is replaced.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import nbaccel
from nbaccel.launching.launcher import Launcher
from nbaccel.testing import run_ranks
from nbaccel.utils import GradientAccumulationPlugin

accelerate = pytest.importorskip("accelerate", reason="its scripts are what is run; `make test` installs it")

Call = tuple[str, tuple[Any, ...]]

_SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
_IMPORT = re.compile(r"^(\s*)(from|import) accelerate(?!\.test_utils)\b", re.M)
_CHOICES = tuple(itertools.product([True, False], repeat=3))
"""Of splitting batches, of rank 0 reading for all, and of gradients that meet at each batch."""

STATE, ACCELERATOR = "a PartialState", "an Accelerator"
"""Arguments that each rank makes for a check."""

OPERATIONS: Sequence[Call] = (
    ("test_gather", (STATE,)),
    ("test_gather_object", (STATE,)),
    ("test_gather_non_contiguous", (STATE,)),
    ("test_broadcast", (STATE,)),
    ("test_pad_across_processes", (STATE,)),
    ("test_reduce_sum", (STATE,)),
    ("test_reduce_mean", (STATE,)),
    ("test_reduce_max", (STATE,)),
    ("test_op_checker", (STATE,)),
    ("test_copy_tensor_to_devices", (STATE,)),
)
SCRIPT: Sequence[Call] = (
    ("init_state_check", ()),
    ("process_execution_check", ()),
    ("test_split_between_processes_list", ()),
    ("test_split_between_processes_nested_dict", ()),
    ("test_split_between_processes_tensor", ()),
    ("test_split_between_processes_evenly", ()),
    ("rng_sync_check", ()),
    ("dl_preparation_check", ()),
    ("central_dl_preparation_check", ()),
    ("custom_sampler_check", ()),
    ("check_seedable_sampler", ()),
    ("check_seedable_sampler_with_data_seed", ()),
    ("check_seedable_sampler_in_batch_sampler_shard", ()),
    ("training_check", (False,)),
    ("training_check", (True,)),
    ("test_trigger", ()),
    ("test_reinstantiated_state", ()),
)
SYNC: Sequence[Call] = (
    ("test_dataloader_break", ()),
    ("test_noop_sync", (ACCELERATOR,)),
    ("test_distributed_sync", (ACCELERATOR,)),
    ("test_distributed_sync_multiple_fwd", (ACCELERATOR,)),
    *(("test_gradient_accumulation", choice) for choice in _CHOICES),
    *(("test_gradient_accumulation_with_opt_and_scheduler", choice) for choice in _CHOICES),
)

_OF_ONE_PROCESS = ("test_noop_sync",)
_OF_SEVERAL = (
    "test_distributed_sync",
    "test_distributed_sync_multiple_fwd",
    "test_gradient_accumulation",
    "check_seedable_sampler_in_batch_sampler_shard",
)
"""Checks that Accelerate runs in one process alone, and in several alone."""

_WITH_PACKAGES = ("test_split_between_processes_dataset",)
"""Checks of `datasets`, see `test_rows_of_datasets_are_split_as_accelerate_splits_them`."""

DIFFERENT: Mapping[str, tuple[Sequence[int], str, str]] = {
    "training_check(False)": (
        (2,),
        "Did not obtain the same model on CPU or distributed training",
        "several ranks draw the order of an epoch from the seed and the number of the epoch, so that it can be resumed "
        "anywhere; use_seedable_sampler=True, which is checked too, gives Accelerate's",
    ),
    "check_seedable_sampler_in_batch_sampler_shard()": (
        (2,),
        "Sampler in BatchSamplerShard is not SeedableRandomSampler",
        "the program's own sampler is left as it is; that its order is the seeded one is another check",
    ),
    "test_reinstantiated_state()": (
        (1, 2),
        "DID NOT RAISE AttributeError",
        "states share nothing: a reset takes nothing away from an Accelerator that exists, and it trains on",
    ),
}
"""Checks that fail on purpose: in how many processes, with which words, and why."""


def script(name: str) -> types.ModuleType:
    """Return Accelerate's script as a module that imports from nbaccel."""
    path = _SCRIPTS / f"{name}.py"
    module = types.ModuleType(name)
    text = _IMPORT.sub(r"\1\2 nbaccel", path.read_text(encoding="utf-8"))
    exec(compile(text, str(path), "exec"), module.__dict__)
    if hasattr(module, "are_the_same_tensors"):
        module.are_the_same_tensors = _are_the_same  # type: ignore[attr-defined]
    return module


def _are_the_same(tensor: Any) -> bool:
    everyone = nbaccel.utils.gather(tensor[None].clone())
    return all(bool((each == everyone[0]).all()) for each in everyone)


def failures(name: str, calls: Sequence[Call], folder: str, changes: Mapping[str, Any]) -> dict[str, str]:
    """Return for each check that failed its error, by the call. Called in ranks.

    changes: values of the script's names.
    """
    warnings.simplefilter("ignore")
    os.chdir(folder)  # a check writes a file there
    module = script(name)
    module.__dict__.update(changes)
    made = {STATE: nbaccel.PartialState, ACCELERATOR: nbaccel.Accelerator}
    found: dict[str, str] = {}
    for function, arguments in calls:
        try:
            getattr(module, function)(*(made[each]() if each in made else each for each in arguments))
        except BaseException as error:  # pytest's own is no Exception
            found[f"{function}({', '.join(map(str, arguments))})"] = f"{type(error).__name__}: {error}"
    return found


def calls_for(world_size: int, calls: Sequence[Call]) -> list[Call]:
    """Return those of the checks that Accelerate runs in so many processes."""
    left_out = _OF_SEVERAL if world_size == 1 else _OF_ONE_PROCESS
    return [call for call in calls if call[0] not in left_out]


def assert_right(name: str, world_size: int, calls: Sequence[Call], folder: Path, **changes: Any) -> None:
    """Every check is right in every rank, or fails as `DIFFERENT` says."""
    chosen = calls_for(world_size, calls)
    names = {f"{function}({', '.join(map(str, arguments))})" for function, arguments in chosen}
    expected = {call: words for call, (sizes, words, _) in DIFFERENT.items() if world_size in sizes and call in names}
    for found in run_ranks(world_size, failures, name, chosen, str(folder), changes, timeout_s=150):
        assert {call: error for call, error in found.items() if call not in expected} == {}
        assert [call for call, words in expected.items() if words not in found.get(call, "")] == []


@pytest.mark.slow
def test_operations_are_right_in_two_processes(tmp_path: Path) -> None:
    assert_right("test_ops", 2, OPERATIONS, tmp_path)


@pytest.mark.full
@pytest.mark.slow
def test_operations_are_right_in_one_process(tmp_path: Path) -> None:
    assert_right("test_ops", 1, OPERATIONS, tmp_path)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_script_of_everything_is_right(world_size: int, tmp_path: Path) -> None:
    assert_right("test_script", world_size, SCRIPT, tmp_path)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_meet_when_they_should_where_a_short_window_weighs_as_in_accelerate(
    world_size: int, tmp_path: Path
) -> None:
    plugin = functools.partial(GradientAccumulationPlugin, scale_last_window=False)
    assert_right("test_sync", world_size, SYNC, tmp_path, GradientAccumulationPlugin=plugin)


@pytest.mark.full
@pytest.mark.slow
def test_a_short_last_window_is_a_mean_of_its_own_batches_on_purpose(tmp_path: Path) -> None:
    """Five batches in windows of two: the last one is divided by one here, and by two in Accelerate."""
    calls = [("test_gradient_accumulation", (True, False, False))]
    for found in run_ranks(2, failures, "test_sync", calls, str(tmp_path), {}):
        (error,) = found.values()
        assert "Gradients not in sync when they should be at iteration 4" in error


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_datasets_are_split_as_accelerate_splits_them(world_size: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="`make full` installs what only other people's programs need")
    calls = [("test_split_between_processes_dataset", (datasets.Dataset,))]
    assert run_ranks(world_size, failures, "test_script", calls, str(tmp_path), {}) == [{}] * world_size


# --- launches from a notebook ----------------------------------------------------------------------------------

RAISES_ANOTHER = "test_monitoring"
"""It wants torch's ChildFailedError; here the function's own error is raised, as in one process."""


@pytest.fixture
def notebook(ready_launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    monkeypatch.setenv("ACCELERATE_NUM_PROCESSES", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ports mean nothing here, and that ranks are started again
        yield script("test_notebook")


@pytest.mark.full
@pytest.mark.slow
def test_launches_from_a_notebook_are_right(notebook: types.ModuleType) -> None:
    checks = {name for name in vars(notebook) if name.startswith("test_")}
    assert checks == {
        *("test_can_initialize", "test_clean_cuda_fork", "test_static_rdzv_backend", "test_c10d_rdzv_backend"),
        *("test_fault_tolerant", RAISES_ANOTHER),
        "test_problematic_imports",  # of bitsandbytes, which may have used CUDA: ranks start from a clean process then
    }
    for name in sorted(checks - {RAISES_ANOTHER, "test_problematic_imports"}):
        getattr(notebook, name)()


@pytest.mark.full
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_one_that_sleeps_with_the_functions_own_error(notebook: types.ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"I'm an even process\. I don't like to sleep"):
        nbaccel.notebook_launcher(notebook.bipolar_sleep_function, (100,), num_processes=2, monitor_interval=0.01)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("test_ops", OPERATIONS), ("test_script", SCRIPT), ("test_sync", SYNC)],
    ids=lambda each: str(each)[:11],
)
def test_no_check_of_a_script_is_left_out(name: str, calls: Sequence[Call]) -> None:
    checks = re.findall(r"^def (test_\w+|check_(?!model_)\w+|\w+_check)\(", (_SCRIPTS / f"{name}.py").read_text(), re.M)
    assert set(checks) - set(_WITH_PACKAGES) == {function for function, _ in calls}
