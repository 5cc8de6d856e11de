"""Functions to which the names of a cell lead."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from nbaccel.features.source.users_functions import functions_reached

ABOVE = """
import functools, torch

def plain(): return helper()
def helper(): return 1
def unnamed(): pass
other = [unnamed]

@torch.no_grad()
def decorated(): pass

class Base:
    def of_base(self): pass
class Runner(Base):
    def __init__(self): self.callbacks = {"end": [held]}
    def fit(self): pass
    @staticmethod
    def still(): pass
    @property
    def best(self): return 1
def held(): pass
runner = Runner()
bound = runner.fit

def maker():
    def inner(): pass
    return lambda: inner()
made = maker()
part = functools.partial(held, 1)
model = torch.nn.Linear(1, 1)
def of_hook(*_): pass
model.register_forward_hook(of_hook)
"""


def reached(cell: str, names: dict[str, Any] | None = None) -> set[str]:
    namespace = types.ModuleType("__main__").__dict__ | (names or {})
    exec(compile(ABOVE, "above", "exec"), namespace)
    parts = [compile(cell, "cell", "exec")]
    found = functions_reached(parts, namespace, lambda file: file in ("above", "cell") or "local_of_test" in file)
    return {each.__qualname__.rpartition(".")[2] for each in found} & {
        *("plain", "helper", "unnamed", "decorated", "of_base", "__init__", "fit", "still", "best", "held", "inner"),
        *("<lambda>", "of_hook", "train"),
    }


RUNNER = {"of_base", "__init__", "fit", "still", "best", "held"}


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("for i in range(3): plain()", {"plain", "helper"}),
        ("decorated()", {"decorated"}),
        ("runner.fit()", RUNNER),
        ("Runner()", RUNNER),
        ("bound()", RUNNER),
        ("made()", {"<lambda>", "inner"}),
        ("part()", {"held"}),
        ("model(1)", {"of_hook"}),
        ("def run(): return [plain for _ in 'ab']", {"plain", "helper"}),
        ("1 + 1", set()),
    ],
)
def test_names_lead_to_functions_and_not_beyond(cell: str, found: set[str]) -> None:
    assert reached(cell) - ({"__init__"} if "Runner" not in cell and found is not RUNNER else set()) == found


def test_a_cell_that_reads_names_by_text_may_reach_all() -> None:
    assert {"unnamed", "plain"} <= reached("eval('plain()')")


def test_a_local_module_is_reached_by_its_name_and_one_of_a_library_is_not(tmp_path: Path) -> None:
    module = types.ModuleType("engine")
    module.__file__ = str(tmp_path / "local_of_test.py")
    exec(compile("def train(): pass", module.__file__, "exec"), vars(module))
    assert reached("engine.train()", {"engine": module}) == {"train"}
    module.__file__ = "library.py"
    assert reached("engine.train()", {"engine": module}) == set()


def test_millions_of_objects_of_other_names_are_not_looked_at() -> None:
    class Never:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("looked at")

    assert reached("plain()", {"rows": [Never() for _ in range(9)]}) == {"plain", "helper"}
