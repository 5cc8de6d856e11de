"""The launcher's helpers run before the first test here, which would otherwise leave them behind."""

from __future__ import annotations

import pytest

from nbaccel.launching.launcher import Launcher


@pytest.fixture(scope="session", autouse=True)
def launcher_is_there(ready_launcher: Launcher) -> None:
    """Most tests of this folder launch without naming the launcher."""
