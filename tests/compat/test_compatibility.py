"""The compatibility page tells the truth: about nbaccel, about accelerate, and it is the one that the table makes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import nbformat
import pytest
from torch.utils.data import DataLoader

import nbaccel
import nbaccel.utils
from environments import ENVIRONMENTS, REPOSITORY, Environment
from headless import execute


def _load() -> ModuleType:
    path = REPOSITORY / "notebooks" / "compatibility.py"
    spec = importlib.util.spec_from_file_location("compatibility", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compatibility"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


compatibility = _load()
ROWS = [(group, row) for group in compatibility.GROUPS for row in group.rows()]
OURS = [(group, row) for group, row in ROWS if row.is_ours]


def names(place: str) -> set[str]:
    """What is visible at "package.module:Class", or the parameters of a function there."""
    module, _, path = place.partition(":")
    value: Any = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        value = getattr(value, part)
    return set(inspect.signature(value).parameters) if path.endswith("__init__") else set(dir(value))


def test_every_name_that_is_ours_is_there() -> None:
    missing = [f"{group.ours} {row.name}" for group, row in OURS if row.name not in names(group.ours)]
    assert not missing


def test_a_name_that_is_not_ours_is_not_there() -> None:
    there = [f"{group.ours} {row.name}" for group, row in ROWS if not row.is_ours and row.name in names(group.ours)]
    assert not there, "the page is behind: these exist"


def test_every_name_is_one_of_accelerate() -> None:
    pytest.importorskip("accelerate")
    invented = [f"{group.theirs} {row.name}" for group, row in ROWS if row.name not in names(group.theirs)]
    # Attributes that accelerate's objects get when they are made.
    assert set(invented) <= {"accelerate.data_loader:DataLoaderShard batch_sampler"}


@pytest.mark.parametrize(
    "place", ["accelerate:Accelerator", "accelerate:PartialState", "accelerate:Accelerator.__init__"]
)
def test_no_public_name_of_these_is_left_out(place: str) -> None:
    pytest.importorskip("accelerate")
    (group,) = (group for group in compatibility.GROUPS if group.theirs == place)
    public = {name for name in names(place) if not name.startswith("_") and name != "self"}
    assert public - {row.name for row in group.rows()} == set()


def test_no_name_at_the_top_of_accelerate_is_left_out() -> None:
    accelerate = pytest.importorskip("accelerate")
    public = {
        name for name, value in vars(accelerate).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public - {row.name for row in next(iter(compatibility.GROUPS)).rows()} == set()


def test_every_utility_of_ours_that_accelerate_has_is_on_the_page() -> None:
    pytest.importorskip("accelerate")
    (group,) = (group for group in compatibility.GROUPS if group.theirs == "accelerate.utils")
    shared = set(nbaccel.utils.__all__) & names("accelerate.utils")
    assert shared - {row.name for row in group.rows()} == set()


def test_names_at_the_top_of_both_are_the_same_names() -> None:
    """What programs import from accelerate's top they find at ours."""
    (group,) = (group for group in compatibility.GROUPS if group.theirs == "accelerate")
    assert {row.name for row in group.rows() if row.is_ours} <= set(nbaccel.__all__)


def test_no_name_stands_twice_and_every_state_is_known() -> None:
    twice = [key for key, count in Counter((group.title, row.name) for group, row in ROWS).items() if count > 1]
    assert not twice
    assert {row.state for _, row in ROWS} <= set(compatibility.STATES)
    assert not [row.name for _, row in ROWS if row.state == "differs" and not row.note], "say what differs"


def test_every_name_that_is_ours_stands_in_a_test() -> None:
    """A name that no test speaks of is a promise that nobody holds."""
    sources = [*(REPOSITORY / "tests").rglob("test_*.py"), *(REPOSITORY / "tests" / "programs").glob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    assert not sorted({row.name for _, row in OURS} - words)


def test_choices_that_need_nothing_here_are_accepted_and_can_be_read() -> None:
    configuration = nbaccel.DataLoaderConfiguration(non_blocking=True, use_stateful_dataloader=True)
    accelerator = nbaccel.Accelerator(dataloader_config=configuration)
    assert (accelerator.non_blocking, accelerator.use_stateful_dataloader) == (True, True)
    loader = accelerator.prepare(DataLoader(range(4), batch_size=2))  # type: ignore[arg-type, var-annotated]
    next(iter(loader))
    assert loader.state_dict()


def test_the_notebook_is_the_one_that_the_table_makes() -> None:
    stored = nbformat.read(compatibility.PAGE, as_version=4)
    made = compatibility.page()
    assert [(cell.id, cell.source) for cell in stored.cells] == [(cell.id, cell.source) for cell in made.cells], (
        "run: make notebooks"
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.name)
def test_the_page_runs_and_misses_nothing(environment: Environment, tmp_path: Any) -> None:
    if not environment.exists:
        pytest.skip(f"{environment.python} is not there; `make test` builds it")
    notebook = nbformat.read(compatibility.PAGE, as_version=4)
    execute(notebook, environment, tmp_path)
    (said,) = (output.text for cell in notebook.cells for output in cell.get("outputs", ()))
    assert re.fullmatch(r"\d{3} names are here; missing: none\n", said)
