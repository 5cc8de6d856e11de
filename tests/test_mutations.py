"""The planted faults have their places in the package, and the tool that plants them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from environments import REPOSITORY
from mutations.__main__ import main
from mutations.faults import Fault, Package, read_faults

FAULTS = read_faults()

ADDITION = """
def add(one, other):
    return one + other


def mean(numbers):
    return sum(numbers) / len(numbers)
"""
TESTS = """
from pathlib import Path

from nbaccel.addition import add


def test_sums_are_sums():
    assert add(2, 3) == 5


def test_fails_whatever_is_planted():
    assert False


def test_fails_once():
    failed = Path(__file__).with_name("failed")
    if add(2, 0) == 3 and not failed.exists():
        failed.touch()
        assert False
"""
PLANTED = """
[[fault]]
name = "A sum is a difference."
find = "one + other"
replace = "one - other"
tests = ["tests/test_addition.py"]

[[fault]]
name = "A mean has one number too few."
find = "/ len(numbers)"
replace = "/ (len(numbers) - 1)"
tests = ["tests/test_addition.py"]

[[fault]]
name = "A sum is one too much where nothing is added."
find = "return one + other"
replace = "return one + (other or 1)"
tests = ["tests/test_addition.py"]
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_and_compiles(fault: Fault) -> None:
    assert not Package(REPOSITORY / "nbaccel").problem(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_search_for_a_fault_begins_with_tests_that_are_there(fault: Fault) -> None:
    assert fault.tests
    assert not [test for test in fault.tests if not (REPOSITORY / test).exists()]


def test_there_are_enough_faults_with_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


def test_every_folder_of_the_package_has_a_fault() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "nbaccel").rglob("*.py")}
    places = {path.parent for path, text in texts.items() if any(fault.find in text for fault in FAULTS)}
    assert places == {path.parent for path in texts}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (Fault("It", "numbers", "n", []), "stands 3 times"),
        (Fault("It", "product", "sum", []), "stands 0 times"),
        (Fault("It", "one + other", "one + other", []), "nothing is replaced"),
        (Fault("It", "one + other", "one +", []), "does not compile"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(tmp_path: Path, fault: Fault, problem: str) -> None:
    (tmp_path / "addition.py").write_text(ADDITION, encoding="utf-8")
    package = Package(tmp_path)
    assert problem in package.problem(fault)
    with pytest.raises(ValueError, match=problem), package.planted(fault):
        pass


def test_a_file_is_as_it_was_after_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "addition.py"
    file.write_text(ADDITION, encoding="utf-8")
    package = Package(tmp_path)
    times = [file.stat().st_mtime]
    with pytest.raises(KeyboardInterrupt), package.planted(Fault("It", "one + other", "one - other", [])):
        assert "one - other" in file.read_text(encoding="utf-8")
        times.append(file.stat().st_mtime)
        raise KeyboardInterrupt
    assert file.read_text(encoding="utf-8") == ADDITION
    assert len({*map(int, times), int(file.stat().st_mtime)}) == 3  # or Python would go on with the other's byte code


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a package, tests and a Makefile."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # those of Jupyter and others take seconds to load
    tree = tmp_path / "tree"
    for name, text in {
        "nbaccel/__init__.py": "",
        "nbaccel/addition.py": ADDITION,
        "tests/test_addition.py": TESTS,
        "tests/test_nothing.py": "import no_such_module\n",
        "Makefile": 'PYTEST_ARGS ?= -m "not gpu"\n',
        "faults.toml": PLANTED,
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", tree], check=True)
    _commit(tree)
    return tree


def _commit(tree: Path) -> None:
    for command in ("add .", "-c user.name=a -c user.email=a@b commit --quiet -m all"):
        subprocess.run(["git", "-C", tree, *command.split()], check=True)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_fault_is_caught_by_a_test_that_fails_with_it_alone(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tree / "results.json"
    arguments = ["--folder", str(tree), "--faults", str(tree / "faults.toml"), "--json", str(results)]
    assert main([*arguments, "--check"]) == 0
    assert not results.exists()
    assert main(arguments) == 1
    outcomes = list(json.loads(results.read_text(encoding="utf-8"))["faults"].values())
    names = "sums_are_sums", "fails_whatever_is_planted", "fails_once"
    sums, broken, once = (f"tests/test_addition.py::test_{name}" for name in names)
    assert [outcome["test"] for outcome in outcomes] == [sums, "", ""]
    assert [outcome["broken"] for outcome in outcomes] == [[], [broken, "tests/test_nothing.py"], []]
    assert [outcome["chance"] for outcome in outcomes] == [[], [], [once]]
    assert (tree / "nbaccel" / "addition.py").read_text(encoding="utf-8") == ADDITION
    capsys.readouterr()
    assert main(arguments) == 1
    *rows, summary = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["SURVIVED", "SURVIVED", "caught"]
    assert summary.startswith('1 of 3 faults caught by -m "not gpu"')


@pytest.mark.slow
def test_arguments_that_pytest_does_not_know_are_no_catch(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tree), "--faults", str(tree / "faults.toml"), "--args=--no-such-flag"]) == 2
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_does_not_end_is_no_catch(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests" / "test_addition.py").write_text("import time\n\n\ndef test_waits():\n    time.sleep(60)\n")
    _commit(tree)
    arguments = ["--folder", str(tree), "--faults", str(tree / "faults.toml"), "--names", "a mean", "--only-near"]
    assert main([*arguments, "--limit", "0.05"]) == 1
    assert capsys.readouterr().out.startswith("hung")
