"""Build what a release consists of: the command behind ``make dist``, and the tests of installing build it likewise.

    python tests/distributions.py dist

A source distribution; a wheel, built from that source distribution, so that what it lacks shows; and
``nbaccel-offline.zip``, the wheel and what it needs on a machine that has torch and Jupyter but no internet:

    python -m zipfile -e nbaccel-offline.zip nbaccel-offline
    python -m pip install --no-index --find-links nbaccel-offline nbaccel

setuptools does the work, which is here because torch needs it. pip fetches the packages beside the wheel.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments import REPOSITORY

__all__ = ["LACKING", "Distributions", "build", "copy_of_the_clone"]

LACKING = ("nvidia-ml-py",)
"""Dependencies that a hosted session may lack, all of them pure Python: Colab's list for GPUs of 2026-08-19 has this
one, its list for CPUs has not, and Kaggle's images are made on top of Colab's."""

_HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
_LEFT_OUT = re.compile(r"^(\.git|\.venv.*|\.envs|build|dist|.*\.egg-info|\.\w+_cache|\.hypothesis|\.coverage.*)$")


@dataclass(frozen=True, slots=True)
class Distributions:
    """The files of one release."""

    sdist: Path
    wheel: Path
    offline: Path


def build(folder: Path, lacking: Sequence[str] = LACKING) -> Distributions:
    """Build into `folder`.

    lacking: the packages beside the wheel in the offline folder.

    Raises:
        subprocess.CalledProcessError: a build failed, or the package index cannot be reached; `stderr` says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        # A copy: setuptools takes along what earlier builds left in `build`, and leaves an egg-info behind.
        clone = copy_of_the_clone(Path(temporary, "clone"))
        sdist = folder / _run_hook("build_sdist", clone, folder)
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary, filter="data")
        wheel = folder / _run_hook("build_wheel", Path(temporary, sdist.name.removesuffix(".tar.gz")), folder)
        packages = Path(temporary, "packages")
        packages.mkdir()
        _download(lacking, packages)
        offline = folder / "nbaccel-offline.zip"
        with zipfile.ZipFile(offline, "w") as archive_of_wheels:  # wheels are compressed already
            for file in [wheel, *sorted(packages.iterdir())]:
                archive_of_wheels.write(file, file.name)
    return Distributions(sdist, wheel, offline)


def copy_of_the_clone(target: Path) -> Path:
    """Copy what belongs to the repository: its tracked files, and those that are new and not ignored."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True, text=True).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git here, or a source distribution
        names = _files_of(REPOSITORY)
    for name in filter(None, names):
        source, copy = REPOSITORY / name, target / name
        if source.is_file():  # not one that was deleted and not committed yet
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    return target


def _files_of(folder: Path) -> list[str]:
    wanted = [path for path in folder.iterdir() if not _LEFT_OUT.match(path.name)]
    files = [file for path in wanted for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return [str(file.relative_to(folder)) for file in files if "__pycache__" not in file.parts]


def _run_hook(hook: str, source: Path, folder: Path) -> str:
    """Run a hook of the build backend in the folder of the project; returns the name of the file that it made."""
    command = [sys.executable, "-c", _HOOK, hook, str(folder.resolve())]
    return subprocess.run(command, cwd=source, capture_output=True, check=True, text=True).stdout.split()[-1]


def _download(packages: Sequence[str], folder: Path) -> None:
    if not packages:
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--platform", "any", "--dest", str(folder), *packages]
    subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True)


def main() -> int:
    """Build into the folder that the command line names, and say what there is and how it is installed."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    try:
        made = build(folder)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    for file in (made.sdist, made.wheel, made.offline):
        print(f"{file}  {file.stat().st_size / 1000:,.0f} kB")
    print(f"install the wheel:  python -m pip install {made.wheel}")
    print(f"without internet:   python -m zipfile -e {made.offline} nbaccel-offline")
    print("                    python -m pip install --no-index --find-links nbaccel-offline nbaccel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
