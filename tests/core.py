"""The command behind ``make test-core``: the tests of the core, where features are not there.

    python tests/core.py             each folder of nbaccel/features taken away by itself, then all of them
    python tests/core.py check all   these

A copy of the package and of the tests lies in a temporary folder; nothing here is changed. `TESTS` run there: of
%load_ext, cells, sessions, the Accelerator, checkpoints, and out of memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from suite import WORKERS

__all__ = ["FOLDERS", "TESTS", "copy_without", "main", "run_in"]

REPOSITORY = Path(__file__).resolve().parent.parent

FOLDERS = sorted(each.parent.name for each in (REPOSITORY / "nbaccel" / "features").glob("*/__init__.py"))

TESTS = (
    "tests/kernel/test_loading.py",
    "tests/kernel/test_training.py",
    "tests/kernel/test_out.py",
    "tests/kernel/test_out_of_memory.py",
    "tests/kernel/test_raw_backward.py",
    "tests/notebook/test_session.py",
    "tests/notebook/test_magics.py",
    "tests/launching/test_oom_restart.py",
    "tests/train/test_exactness.py",
    "tests/train/test_steps.py",
    "tests/train/test_accumulation.py",
    "tests/train/data/test_shares.py",
    "tests/train/checkpoint/test_manager.py",
    "tests/train/checkpoint/test_resume.py",
    "tests/train/oom/test_split_batches.py",
    "tests/train/raw_loop/test_weights.py",
)
"""Files of tests of the core that use its main ways; some four minutes on two cores."""


def copy_without(folder: Path, features: Sequence[str]) -> None:
    """Put a copy of the package without some of its `features`, and of the tests of the core, into `folder`."""
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "nbaccel", folder / "nbaccel", ignore=left_out)
    shutil.copytree(REPOSITORY / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "features"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for feature in features:
        shutil.rmtree(folder / "nbaccel" / "features" / feature)


def run_in(folder: Path, arguments: Sequence[str]) -> int:
    """Run pytest with `arguments` on the copy in `folder`; return its exit code."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not full and not timed and not soak and not gpu",
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=False).returncode


def main(names: Sequence[str]) -> int:
    """Run `TESTS` without each feature of `names`; return 1 if any fails."""
    failed = []
    for name in names or [*FOLDERS, "all"]:
        with tempfile.TemporaryDirectory(prefix="nbaccel-core-") as folder:
            copy_without(Path(folder), FOLDERS if name == "all" else [name])
            print(f"\nwithout nbaccel/features/{name}:", flush=True)
            if run_in(Path(folder), ["-p", "xdist", "-n", str(WORKERS), "--dist", "loadscope", *TESTS]):
                failed.append(name)
    print(f"the core needs: {', '.join(failed)}" if failed else "the core needs no feature")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
