"""Functions of installed modules and classes of the notebook on their way to another process."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from nbaccel.namespace.payload import pack, unpack

LIBRARY = """
import contextvars
active = contextvars.ContextVar("active")
def make():
    def hook(): return active
    return hook
"""


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """An installed module, which has what cannot be pickled."""
    module = types.ModuleType("nbaccel_library")
    module.__spec__ = sys.__spec__
    exec(LIBRARY, vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def travelled(value: Any) -> Any:
    payload = pack({"x": value})
    try:
        return unpack(payload.fd)["x"]
    finally:
        os.close(payload.fd)


def test_a_function_of_an_installed_module_shares_what_is_there(library: types.ModuleType) -> None:
    hook = travelled(library.make())
    assert hook.__globals__ is vars(library)
    assert hook() is library.active


def test_what_else_stands_among_the_modules_does_not_matter(
    library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.active = 1
    hook = library.make()
    for other in (object(), None, types.ModuleType("other")):
        monkeypatch.setitem(sys.modules, library.__name__, other)
        assert travelled(hook)() == 1


def test_a_class_keeps_its_slots() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("class A:\n    __slots__ = ('x', '__y')\n    def __init__(self): self.x, self.__y = 1, 2", namespace)
    a = travelled(namespace["A"]())
    assert not hasattr(a, "__dict__")
    assert (a.x, a._A__y) == (1, 2)
