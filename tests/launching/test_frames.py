"""How many of our frames a rank stands on when a user's function or cell runs in it: no more than today.

They are in every traceback before it is cut, and in every stack that a debugger or a profiler shows.
"""

from __future__ import annotations

from frames import our_frames
from nbaccel.launchers import notebook_launcher
from nbaccel.launching.api import launch

MOST = {"fork": 7, "zygote": 9}


def test_a_launched_function_stands_on_few_frames(start_method: str) -> None:
    def program() -> list[str]:
        return our_frames()

    found = launch(program, 2, start_method=start_method).value
    assert found, "none of ours would mean that they are not recognised"
    assert len(found) <= MOST[start_method], found


def test_a_function_that_is_called_in_place_stands_on_few_frames() -> None:
    seen: list[str] = []
    notebook_launcher(lambda: seen.extend(our_frames("test_a_function_that_is_called_in_place_stands_on_few_frames")))
    assert 0 < len(seen) <= 6, seen
