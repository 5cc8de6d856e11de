"""What a rank says of an exception before it travels."""

from __future__ import annotations

from typing import Any

import pytest

from nbaccel.base.failures import Failure
from nbaccel.launching.ipc.reports import ErrorLink, RankReport, describe


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


def report_of(error: BaseException) -> RankReport:
    return RankReport("failed", -1, links=[ErrorLink.from_json(link) for link in describe(error)])


def chained(error: Exception, cause: Exception, directly: bool) -> Exception:
    if directly:
        error.__cause__ = cause
    else:
        error.__context__ = cause
    return error


LOST = "[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:3"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("expected 10 classes, got 11"), Failure.USER),
        (RuntimeError(LOST), Failure.PEER_LOST),
        (chained(ValueError("the epoch failed"), RuntimeError(LOST), directly=True), Failure.PEER_LOST),
        (chained(ValueError("the epoch failed"), RuntimeError(LOST), directly=False), Failure.USER),
        (chained(ValueError("the epoch failed"), MemoryError(), directly=True), Failure.OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), Failure.OUT_OF_MEMORY),
    ],
)
def test_the_kind_of_a_failure_is_that_of_the_error_or_of_what_directly_caused_it(
    error: BaseException, kind: Failure
) -> None:
    report = report_of(error)
    assert report.kind is kind
    assert report.is_consequence is (kind is Failure.PEER_LOST)


@pytest.mark.parametrize("status", ["ok", "stopped", "exited"])
def test_what_did_not_fail_by_an_error_has_no_kind(status: str) -> None:
    assert RankReport(status, -1).kind is None
