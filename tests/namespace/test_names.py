"""The names that code reads and binds are those that Python's own description of its instructions has."""

from __future__ import annotations

import argparse
import dis
import inspect
import subprocess
import types
from collections.abc import Iterator

import pytest

from nbaccel.namespace.names import names_used


def described(code: types.CodeType, kinds: frozenset[str]) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in kinds:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from described(constant, kinds)


@pytest.mark.parametrize("module", [argparse, inspect, subprocess])
@pytest.mark.parametrize("kinds", [{"LOAD_NAME", "LOAD_GLOBAL"}, {"STORE_NAME", "STORE_GLOBAL"}])
def test_names_are_found_as_python_describes_its_code(module: types.ModuleType, kinds: set[str]) -> None:
    code = compile(inspect.getsource(module), module.__name__, "exec")
    found = list(names_used(code, frozenset(kinds), nested=True))
    assert found == list(described(code, frozenset(kinds)))
    assert len(set(found)) > 10 or "STORE_NAME" not in kinds


def test_names_beyond_the_first_256_are_found() -> None:
    names = [f"name_{number}" for number in range(70_000)]
    code = compile("\n".join(names), "many", "exec")
    assert list(names_used(code, frozenset({"LOAD_NAME"}), nested=False)) == names
