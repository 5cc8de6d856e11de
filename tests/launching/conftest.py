"""One launcher for all tests of this folder: its reaper and its zygote live as long as the test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbaccel.launching.api import launch
from nbaccel.launching.launcher import Launcher, default_launcher


@pytest.fixture(scope="session", autouse=True)
def launcher() -> Iterator[Launcher]:
    import torch._dynamo  # noqa: F401  # sets a variable of the environment, which the guard of every test would report

    launcher = default_launcher()
    launcher.resources.guard("+0")  # starts the reaper; nobody has the number 0
    launcher.resources.guard("-0")
    launch(int, 1, start_method="zygote")  # its start takes seconds, which no test shall be charged for
    launcher.resources.new_log()
    yield launcher
    launcher.close()
    default_launcher.__globals__["_launcher_of"].cache_clear()


@pytest.fixture(params=["fork", "zygote"])
def start_method(request: pytest.FixtureRequest) -> str:
    """Both ways to start ranks: what holds for one holds for the other."""
    return str(request.param)
