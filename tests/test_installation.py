"""Installing nbaccel moves no package that Colab or Kaggle ships; and what is pinned is what is there.

pip plans the installation against the package index and changes nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from environments import COLAB, REPOSITORY

PINS = {name: REPOSITORY / f"constraints-{name}.txt" for name in ("colab", "kaggle")}
NO_INDEX = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|NewConnectionError|"
    r"Network is unreachable|ProxyError|ConnectTimeoutError"
)


def pinned(path: Path) -> dict[str, str]:
    """Package to version, for a file of `name==version` lines."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {_normal(name): number for name, _, number in (line.partition("==") for line in lines if line)}


def plan(*arguments: str) -> dict[str, str]:
    """Package to version: what pip would install into an empty environment; the test is skipped without an index."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    result = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    if result.returncode and NO_INDEX.search(result.stderr):
        pytest.skip("the package index cannot be reached from here")
    assert result.returncode == 0, result.stderr
    chosen = (item["metadata"] for item in json.loads(result.stdout)["install"])
    return {_normal(metadata["name"]): metadata["version"] for metadata in chosen}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("platform", PINS)
def test_installing_under_a_platforms_pins_changes_none_of_them(platform: str) -> None:
    """The pins are requirements here, so every dependency of ours has to live with them."""
    torch = f"torch=={pinned(REPOSITORY / 'constraints.txt')['torch']}"
    planned = plan("-r", str(PINS[platform]), torch, ".")
    pins = pinned(PINS[platform])
    assert {name: planned.get(name) for name in pins} == pins


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_installing_into_the_colab_environment_plans_nbaccel_and_nothing_else() -> None:
    if not COLAB.exists:
        pytest.skip(f"{COLAB.python} is not there; `make test` builds it")
    command = [str(COLAB.python), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", "."]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=300)
    if result.returncode and NO_INDEX.search(result.stderr):
        pytest.skip("the package index cannot be reached from here")
    assert result.returncode == 0, result.stderr
    assert [item["metadata"]["name"] for item in json.loads(result.stdout)["install"]] == ["nbaccel"]


def test_the_environment_of_the_tests_has_the_pinned_versions() -> None:
    pins = pinned(REPOSITORY / "constraints.txt")
    assert {name: version(name).partition("+")[0] for name in pins} == pins


def test_runtime_dependencies_are_the_promised_ones() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [
        "torch>=2.6",
        "ipywidgets>=7.7.1,<9",
        "ipython>=7.34",
        "matplotlib",
        "psutil>=5.9.5",
        "tqdm",
        "cloudpickle",
        "safetensors",
        "nvidia-ml-py",
    ]
