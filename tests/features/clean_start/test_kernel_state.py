"""What a rank of the zygote is given of the kernel's state."""

from __future__ import annotations

import pickle
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nbaccel.features.clean_start.captured_state import KernelState


def test_a_filter_for_a_packages_warnings_waits_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its category would have every rank import the package."""
    package = types.ModuleType("odd_package")
    package.Odd = type("Odd", (UserWarning,), {"__module__": "odd_package"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odd_package", package)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=package.Odd)
        captured = pickle.dumps(KernelState.capture())
    monkeypatch.delitem(sys.modules, "odd_package")
    later: dict[str, Callable[[Any], None]] = {}

    def when_loaded(actions: Mapping[str, Callable[[Any], None]]) -> None:
        later.update(actions)

    with warnings.catch_warnings():
        pickle.loads(captured).apply(when_loaded)
        assert all(one[2] is not package.Odd for one in warnings.filters)
        later["odd_package"](package)
        assert warnings.filters[0] == ("ignore", None, package.Odd, None, 0)


def test_a_rank_does_not_compile_the_patterns_of_filters_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch says.*", module=r"torch\.nn")
        warnings.filterwarnings("ignore", message="the notebook says")
        before = list(warnings.filters)
        captured = pickle.dumps(KernelState.capture())
        del warnings.filters[0]  # type: ignore[attr-defined]
        re.purge()
        state = pickle.loads(captured)
        with monkeypatch.context() as patched:
            compiled: list[str] = []
            compile_ = re.compile
            patched.setattr(re, "compile", lambda text, flags: (compiled.append(text), compile_(text, flags))[1])
            state.apply(lambda actions: None)
        assert warnings.filters == before
        assert compiled == ["the notebook says"]
        with pytest.raises(UserWarning):
            warnings.simplefilter("error", append=True)
            warnings.warn("something else", stacklevel=1)
        warnings.warn("The Notebook says it in capitals", stacklevel=1)  # the flags came along
