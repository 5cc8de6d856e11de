"""The environments that notebook tests run in: the newest front-end packages, and those of Colab.

`make` builds both. They share one torch; what differs is IPython, ipykernel, ipywidgets and their neighbours.

More ipykernels can be tried by hand, each in a folder of its own that stands before the newest environment's packages:

    pip install --no-deps --target /tmp/ipykernel-6.29.5 ipykernel==6.29.5 comm
    NBACCEL_IPYKERNELS=/tmp/ipykernel-6.29.5 pytest tests/kernel -k ipykernel-6.29.5
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import IPython
import pytest

reads_assigned_commands = pytest.mark.skipif(
    IPython.version_info < (8,) and sys.version_info >= (3, 12),
    reason="to IPython 7 on Python 3.12 and later `x = !command` is a SyntaxError, in the notebook too",
)

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python with its own front-end packages.

    name: "newest", "colab" or "kaggle".  python: its interpreter.  before: a folder of packages that stand before its
    own.
    """

    name: str
    python: Path
    before: Path | None = None

    @property
    def exists(self) -> bool:
        return self.python.exists() and (self.before is None or self.before.exists())

    @property
    def kernel_argv(self) -> list[str]:
        """The command that starts a kernel here, as a kernel specification spells it."""
        return [str(self.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]

    def kernel_manager(self, **traits: Any) -> Any:
        """A manager, not started yet, whose kernel will run in this environment."""
        from jupyter_client import KernelManager
        from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

        spec = KernelSpec(argv=self.kernel_argv, display_name=self.name, language="python")

        class OnlyThisKernel(KernelSpecManager):
            def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
                return spec

        return KernelManager(kernel_spec_manager=OnlyThisKernel(), **traits)

    def environ(self, **changes: str) -> dict[str, str]:
        """This process's environment with `changes`, for a program that runs here."""
        return {**os.environ, **self.changes, **changes}

    @property
    def changes(self) -> dict[str, str]:
        """The variables that make a program run here and not elsewhere."""
        if self.before is None:
            return {}
        return {"PYTHONPATH": os.pathsep.join([str(self.before), os.environ.get("PYTHONPATH", str(REPOSITORY))])}


NEWEST = Environment("newest", Path(sys.executable))
COLAB = Environment("colab", REPOSITORY / ".venv-colab" / "bin" / "python")
KAGGLE = Environment("kaggle", COLAB.python, REPOSITORY / ".venv-kaggle")
"""Colab's with Kaggle's ipywidgets; for notebooks on hosted machines alone."""

_MORE = tuple(
    Environment(Path(folder).name, NEWEST.python, Path(folder))
    for folder in os.environ.get("NBACCEL_IPYKERNELS", "").split(os.pathsep)
    if folder
)
ENVIRONMENTS = (NEWEST, COLAB, *_MORE)
