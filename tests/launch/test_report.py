"""What a rank says of an exception before it travels."""

from __future__ import annotations

from typing import Any

import pytest

from nbaccel.launch.ipc.reports import describe


def _misspells_a_local() -> None:
    some_name = 3
    _ = some_name
    some_nam  # type: ignore[name-defined]  # noqa: B018, F821


class _Closed:
    def __dir__(self) -> Any:
        raise RuntimeError("nobody's business")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (_misspells_a_local, "NameError: name 'some_nam' is not defined. Did you mean: 'some_name'?"),
        (lambda: "".spilt, "AttributeError: 'str' object has no attribute 'spilt'. Did you mean: 'split'?"),  # type: ignore[attr-defined]
        (lambda: "".xyzzy, "AttributeError: 'str' object has no attribute 'xyzzy'"),  # type: ignore[attr-defined]
        (lambda: _Closed().spilt, "AttributeError: '_Closed' object has no attribute 'spilt'"),  # type: ignore[attr-defined]
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_may_have_been_meant_is_said_on_every_python(act: Any, said: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of any kind
        act()
    (link,) = describe(caught.value)
    assert link["headline"] == [said]
