"""What a release consists of installs, and trains; it moves no package that Colab or Kaggle ships.

Where pip only plans an installation it asks the package index and changes nothing. Where it installs, it does so in a
fresh environment that sees the packages of the tests' environments but not nbaccel, and what a platform lacks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from distributions import LACKING, Distributions, build, copy_of_the_clone
from documents import ADDRESS, README, blocks
from environments import COLAB, KAGGLE, NEWEST, REPOSITORY, Environment
from kernel.harness import RealKernel

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


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("platform", PINS)
def test_installing_under_a_platforms_pins_changes_none_of_them(platform: str) -> None:
    """The pins are requirements here, so every dependency of ours has to live with them."""
    torch = f"torch=={pinned(REPOSITORY / 'constraints.txt')['torch']}"
    planned = plan("-r", str(PINS[platform]), torch, ".")
    pins = pinned(PINS[platform])
    assert {name: planned.get(name) for name in pins} == pins


@pytest.mark.full
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
    absent = {name for name in strangers() if importlib.util.find_spec(name) is None}  # before the first `make full`
    absent |= set(extra("docs"))  # in an environment of their own
    assert {name: version(name).partition("+")[0] for name in pins if name not in absent} == {
        name: number for name, number in pins.items() if name not in absent
    }


def strangers() -> list[str]:
    """What only tests of other people's programs need."""
    return extra("strangers")


def extra(name: str) -> list[str]:
    """The packages of an extra, without their bounds."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [re.split("[<>=]", package)[0] for package in project["optional-dependencies"][name]]


def test_packages_of_other_peoples_programs_are_pinned_and_make_full_alone_installs_them() -> None:
    assert set(strangers()) <= pinned(REPOSITORY / "constraints.txt").keys()
    rules = dict(re.findall(r"^(\S+):(?!=)(.*)$", (REPOSITORY / "Makefile").read_text(), re.M))
    assert "$(VENV)/.strangers" in rules["full"].split()
    assert [rule for rule, needs in rules.items() if ".strangers" in needs] == ["full"]
    assert rules["$(VENV)/.strangers"].split() == ["$(VENV)/.dev"]


def test_what_builds_the_site_is_pinned_and_neither_the_demo_nor_make_test_installs_it() -> None:
    assert set(extra("docs")) <= pinned(REPOSITORY / "constraints.txt").keys()
    rules = dict(re.findall(r"^(\S+):(?!=)(.*)$", (REPOSITORY / "Makefile").read_text(), re.M))
    assert [rule for rule, needs in rules.items() if "$(DOCS)" in needs] == ["full", "docs"]


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


def test_the_offline_folder_has_what_kaggle_lacks_and_all_else_is_there() -> None:
    """torch and safetensors are in Colab's images, on which Kaggle's are made; the rest is pinned for Kaggle."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]}
    assert needed - pinned(PINS["kaggle"]).keys() - {"torch", "safetensors"} == set(LACKING)


def test_the_extras_are_what_the_tests_run() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"tensorboard", "wandb", "mlflow", "deepspeed", "ray", "demo", "dev", "docs", "strangers"}
    tested = {requirement.partition("-")[0] for requirement in extras["dev"]}
    assert {package for name in ("tensorboard", "wandb", "mlflow") for package in extras[name]} <= tested


# --- installing for real ---------------------------------------------------------------------------------------

PLATFORMS = {"newest": [NEWEST], "colab": [COLAB, NEWEST], "kaggle": [KAGGLE, COLAB, NEWEST]}
"""Whose packages a platform has; the first one that has a package counts."""

SHOWN = ADDRESS or "ADDRESS"
"""How the README names the repository."""

_OF_THE_README = [line for block in blocks(README, "sh")[:1] for line in block.text.splitlines()]
PRODUCTS = {
    **dict(zip(("clone", "git", "wheel", "offline folder"), _OF_THE_README, strict=True)),
    "editable clone": "pip install -e .",
    "source distribution": "pip install nbaccel-0.1.0.tar.gz",
}
"""What can be installed, by the line that a reader types in the folder where it lies; as the README has it."""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """A release, built as ``make dist`` builds it."""
    try:
        return build(tmp_path_factory.mktemp("dist"))
    except subprocess.CalledProcessError as error:
        if NO_INDEX.search(error.stderr):
            pytest.skip("the package index cannot be reached from here")
        raise AssertionError(error.stderr) from error


@pytest.fixture
def unpacked(distributions: Distributions, tmp_path: Path) -> Path:
    """A clone with its history, with the files of the release beside its own, and the offline folder unpacked."""
    clone = copy_of_the_clone(tmp_path / "work" / "nbaccel")
    git = ["git", "-c", "user.name=nbaccel", "-c", "user.email=nbaccel@localhost", "-C", str(clone)]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "A clone"]):
        subprocess.run([*git, *command], check=True)
    for file in (distributions.wheel, distributions.sdist):
        (clone / file.name).write_bytes(file.read_bytes())
    unpack = [sys.executable, "-m", "zipfile", "-e", str(distributions.offline), str(clone / "nbaccel-offline")]
    subprocess.run(unpack, check=True)
    return clone


class Fresh:
    """A virtual environment that has pip, the packages of a platform but for nbaccel, and not what Kaggle lacks.

    The packages are links in a folder that a .pth file appends: what pip installs comes before them.
    """

    def __init__(self, folder: Path, platform: list[Environment]) -> None:
        links = folder / "packages"
        links.mkdir(parents=True)
        known: set[str] = set()
        for environment in platform:
            entries = [path for path in site_packages(environment).iterdir() if not _HIDDEN.match(path.name)]
            new = [path for path in entries if _entry(path) not in known]
            for path in new:
                (links / path.name).symlink_to(path)
            known |= {_entry(path) for path in new}
        venv.create(folder / "env", symlinks=True)
        self.python = folder / "env" / "bin" / "python"
        self._purelib = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "env")}))
        Path(self._purelib, "packages.pth").write_text(f"{links}\n")

    def installed(self) -> list[Path]:
        """The metadata of what was installed since."""
        return [*self._purelib.glob("*.dist-info")]

    def run(self, command: str, folder: Path, **environ: str) -> str:
        """Run a line of a shell in `folder`, as somebody types it who has activated the environment."""
        words = shlex.split(command, comments=True)
        if words[0] == "pip":
            words = ["python", "-m", *words]
        words[0] = str(self.python.with_name(words[0]))
        changes = {"PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environ}
        result = subprocess.run(
            words, cwd=folder, env=os.environ | changes, capture_output=True, text=True, timeout=300
        )
        if result.returncode and NO_INDEX.search(result.stdout + result.stderr):
            pytest.skip("the package index, which has the build's setuptools, cannot be reached from here")
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def versions(self) -> dict[str, str]:
        """Package to version, as pip sees them there."""
        listed = json.loads(self.run("pip list --format json", self.python.parent))
        return {_normal(package["name"]): package["version"] for package in listed}

    @contextmanager
    def kernel(self, folder: Path) -> Iterator[RealKernel]:
        kernel = RealKernel(Environment("fresh", self.python), folder, PYTHONPATH="")
        try:
            yield kernel
        finally:
            kernel.close()


_HIDDEN = re.compile(r"__pycache__|.*\.(pth|egg-link)$|_{0,2}(editable_+)?nbaccel|nvidia_ml_py|pynvml|example\.py$")


def _entry(path: Path) -> str:
    """What a platform has once: a package's folder or file, its metadata of whatever version."""
    return f"{path.name.partition('-')[0]} metadata" if path.suffix == ".dist-info" else path.name


def site_packages(environment: Environment) -> Path:
    """Where the packages of an environment of the tests lie; the test is skipped where it was not built."""
    if not environment.exists:
        pytest.skip(f"{environment.python} is not there; `make test` builds it")
    if environment.before is not None:
        return environment.before
    base = environment.python.parent.parent
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(base)}))


def trains(kernel: RealKernel) -> str:
    """Run the first two cells of the README in two ranks; returns the file that nbaccel was imported from."""
    setup, cell = [block.text for block in blocks(README, "python")[:2]]
    kernel.do(setup, timeout_s=150)
    ran = kernel.do(cell, timeout_s=150)
    assert cell.startswith("%%accelerate -n 2")
    assert "model trained in place (1.5 k parameters)" in ran.stdout
    kernel.do("import nbaccel")
    return str(kernel.value("nbaccel.__file__"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_without_internet_the_lines_for_kaggle_install_there_and_train(unpacked: Path, tmp_path: Path) -> None:
    fresh = Fresh(tmp_path / "fresh", PLATFORMS["kaggle"])
    (lines,) = [block.text for block in blocks(README, "python") if "/kaggle/input/nbaccel-offline" in block.text]
    with fresh.kernel(tmp_path) as kernel:
        said = kernel.do(lines.replace("/kaggle/input/nbaccel-offline", str(unpacked / "nbaccel-offline")))
        assert "ERROR" not in said.text
        assert trains(kernel).startswith(str(tmp_path / "fresh"))
    listed = {path.name.partition("-")[0] for path in fresh.installed()}
    assert listed - {"pip", "setuptools"} == {"nbaccel", "nvidia_ml_py"}, "and nothing that was there was moved"


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("platform", ["colab", "kaggle"])
def test_with_internet_the_lines_for_kaggle_install_there_and_train(
    platform: str, unpacked: Path, tmp_path: Path
) -> None:
    fresh = Fresh(tmp_path / "fresh", PLATFORMS[platform])
    (lines,) = [block.text for block in blocks(README, "python") if f'"git+{SHOWN}"' in block.text]
    with fresh.kernel(tmp_path) as kernel:
        kernel.do(lines.replace(SHOWN, f"file://{unpacked}"), timeout_s=120)
        assert trains(kernel).startswith(str(tmp_path / "fresh"))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_kernel_beside_or_inside_an_editable_clone_imports_the_package(unpacked: Path, tmp_path: Path) -> None:
    """Beside it the clone's folder has the package's name, and would be taken for it where a finder came later."""
    fresh = Fresh(tmp_path / "fresh", PLATFORMS["newest"])
    fresh.run("pip install --no-deps --no-build-isolation -e .", unpacked)
    said = "python -c 'import nbaccel; print(nbaccel.__file__, nbaccel.__version__)'"
    expected = f"{unpacked / 'nbaccel' / '__init__.py'} {version('nbaccel')}\n"
    for folder in (unpacked.parent, unpacked, unpacked / "notebooks"):
        assert fresh.run(said, folder) == expected, folder
    with fresh.kernel(unpacked.parent) as kernel:
        kernel.do("%load_ext nbaccel")
        assert kernel.value("get_ipython().find_cell_magic('accelerate') is not None")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_each_product_installs_under_each_platforms_pins_and_runs_the_demo_and_a_cell(
    product: str, platform: str, unpacked: Path, tmp_path: Path
) -> None:
    fresh = Fresh(tmp_path / "fresh", PLATFORMS[platform])
    before = fresh.versions()
    fresh.run(PRODUCTS[product].replace(SHOWN, f"file://{unpacked}"), unpacked)
    after = fresh.versions()
    assert after.keys() - before.keys() == {"nbaccel", *LACKING}
    assert {name: after[name] for name in before} == before, "nothing that was there was moved"
    demo = f"nbaccel demo --notebook {unpacked / 'notebooks' / '01_quickstart.ipynb'} --output done.ipynb"
    accuracy = re.search(r"accuracy (\d\.\d+)", fresh.run(demo, tmp_path))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.95
    with fresh.kernel(tmp_path) as kernel:
        is_editable = "editable" in product
        assert trains(kernel).startswith(str(unpacked if is_editable else tmp_path / "fresh"))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_wheel_installs_into_an_environment_that_has_nothing(distributions: Distributions, tmp_path: Path) -> None:
    """torch too comes from the package index here, in the version of constraints.txt."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(REPOSITORY / "constraints.txt")]
    alone = os.environ | {"PYTHONPATH": ""}  # else pip finds nbaccel where a path leads to a clone
    result = subprocess.run(
        [*install, str(distributions.wheel), "ipykernel"], env=alone, capture_output=True, text=True, timeout=900
    )
    if result.returncode and NO_INDEX.search(result.stderr):
        pytest.skip("the package index cannot be reached from here")
    assert result.returncode == 0, result.stderr
    kernel = RealKernel(Environment("empty", python), tmp_path, PYTHONPATH="")
    try:
        assert trains(kernel).startswith(str(tmp_path / "env"))
    finally:
        kernel.close()
