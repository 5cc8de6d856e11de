"""`make test` runs a chosen part of the cases of each test, and `make test-all` the others: none is in neither."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

from environments import REPOSITORY
from selection import MOST_SLOW, cover, scope, spread

CONFTEST = """
import pytest
from selection import in_order, select

def pytest_collection_modifyitems(items):
    select(items)
    items[:] = in_order(items)
"""

TESTS = """
import pytest
from environments import COLAB, NEWEST

both = pytest.mark.parametrize("environment", [NEWEST, COLAB], ids=lambda each: each.name)
start = pytest.mark.parametrize("start", ["fork", "zygote"])
device = pytest.mark.parametrize("device", ["cpu", "cuda"])
rank = pytest.mark.parametrize("rank", [0, 1])

@both
def test_in_the_newest(environment): pass

@both
@pytest.mark.front_ends
def test_in_both(environment): pass

@start
def test_one_way(start): pass

@start
def test_the_other_way(start): pass

@device
@rank
def test_each_value(device, rank): pass

@device
@rank
@start
@pytest.mark.product
def test_each_pair(device, rank, start): pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(9))
def test_slow(number): pass

@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(9))
def test_sampled(number): pass

@pytest.mark.full
@start
def test_of_all(start): pass

@pytest.mark.parametrize("name,number", [("a", 1), ("b", 2), ("c", 3)])
def test_names_that_vary_together(name, number): pass
"""


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 4), (3, 3, 3, 3), (2, 5, 1, 3)])
def test_a_cover_meets_every_pair_of_values_with_fewer_cases(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[position] for position in cover(cases)]

    def pairs(of: list[tuple[int, ...]]) -> set[object]:
        return {pair for case in of for pair in combinations(enumerate(case), 2)}

    assert pairs(chosen) == pairs(cases)
    assert len(chosen) < len(cases)


def test_of_two_parameters_each_value_is_met() -> None:
    cases = list(product(range(3), range(2)))
    chosen = [cases[position] for position in cover(cases)]
    assert {first for first, _ in chosen} == {0, 1, 2}
    assert {second for _, second in chosen} == {0, 1}
    assert len(chosen) == 3


def test_one_list_of_cases_is_its_own_cover() -> None:
    assert cover([(0,), (1,), (2,)]) == [0, 1, 2]
    assert cover([]) == []


@pytest.mark.parametrize(
    ("count", "most", "positions"), [(3, 4, [0, 1, 2]), (9, 4, [0, 2, 5, 8]), (9, 2, [0, 8]), (9, 1, [0]), (0, 4, [])]
)
def test_a_sample_is_spread_over_the_list(count: int, most: int, positions: list[int]) -> None:
    assert spread(count, most) == positions


def test_a_worker_process_takes_a_file_or_what_shares_a_server() -> None:
    assert scope("tests/kernel/test_out.py::test_a[b::c/d]") == "tests/kernel/test_out.py"
    assert (
        scope("tests/browser/test_panel.py::test_a") == scope("tests/browser/test_form.py::test_b") == "tests/browser"
    )


@pytest.mark.slow
def test_each_case_is_run_by_make_test_or_by_make_test_all(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(TESTS)
    chosen, left = collected(tmp_path, "not full"), collected(tmp_path, "full")
    assert not chosen & left
    assert {each for each in chosen if "newest" in each or "colab" in each} == {
        "test_in_the_newest[newest]",
        "test_in_both[newest]",
        "test_in_both[colab]",
    }
    assert {each for each in chosen if "each_value" in each} == {"test_each_value[0-cpu]", "test_each_value[1-cuda]"}
    assert sum("each_pair" in each for each in chosen) == 8
    assert sum("way[" in each for each in chosen) == 2
    assert sum("test_slow" in each for each in chosen) == MOST_SLOW
    assert {each for each in chosen if "sampled" in each} == {f"test_sampled[{number}]" for number in (0, 4, 8)}
    assert sum("of_all" in each for each in left) == 2
    assert sum("vary_together" in each for each in chosen) == 3
    assert len(chosen | left) == 2 + 2 + 2 + 2 + 4 + 8 + 9 + 9 + 2 + 3


def collected(folder: Path, marks: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", marks]
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "tests"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # installed plugins take seconds to import
        "PYTEST_ADDOPTS": "",  # what the run around it is asked for, such as -v, would change what is printed
    }
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=50)
    return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
