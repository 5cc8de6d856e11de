"""The testing kit as the README shows it."""

from __future__ import annotations

import re

from environments import REPOSITORY


def test_the_readmes_example_of_a_test_runs_as_it_stands_there() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    (example,) = [block for block in blocks if "nbaccel.testing" in block]
    exec(compile(example, "README.md", "exec"), {})
