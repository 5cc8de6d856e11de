"""Hosted machines: Kaggle's and Colab's, with their variables, four cores, 30 GB and a disk of 20 GB, and no network.

Notebooks run on them as their services run them: interactively, or as a batch that nobody watches.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from environments import COLAB, KAGGLE as KAGGLE_PACKAGES, Environment
from hosted.without_network import DENIED

_HERE = Path(__file__).parent

_MACHINE = """
import collections as _collections, shutil as _shutil, nbaccel.base.hardware as _hardware
_hardware.usable_cores = lambda *root: 4
_hardware.usable_memory = lambda *root: _hardware.MemoryInfo(30 * 10**9, 28 * 10**9)
_usage = _collections.namedtuple("usage", "total used free")(20 * 10**9, 10**9, 19 * 10**9)
_shutil.disk_usage = lambda path: _usage
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """name: of the service, and how it runs notebooks.  variables: by which it is known.  environment: its packages."""

    name: str
    variables: tuple[tuple[str, str], ...]
    environment: Environment

    def run(self, cells: list[str], folder: Path, *, goes_on: bool = False, **variables: str) -> Ran:
        """Execute `cells` in a fresh kernel in `folder`; what fails ends the notebook, as Run All does.

        goes_on: a person is there, and runs the next cell.
        """
        if not self.environment.exists:
            pytest.skip(f"{self.environment.python} is not there; `make test` builds it")
        asked = folder / "asked_the_net"
        environ = self.environment.environ()
        environ |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_HERE / "site"), environ.get("PYTHONPATH")])),
            "NBACCEL_TEST_NET": str(asked),
            "OMP_NUM_THREADS": "1",
            **dict(self.variables),
            **variables,
        }
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (_MACHINE, *cells)])
        alone = [sys.executable, str(_HERE / "without_network.py"), *self.environment.kernel_argv]
        spec = KernelSpec(argv=alone, display_name=self.name, language="python")

        class OnlyThisKernel(KernelSpecManager):
            def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
                return spec

        sockets = tempfile.mkdtemp(prefix="nb-")  # short: the path of a socket has 107 bytes at most
        manager = AsyncKernelManager(kernel_spec_manager=OnlyThisKernel(), transport="ipc", ip=f"{sockets}/s")
        client = NotebookClient(
            notebook, km=manager, timeout=150, allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )
        try:
            with client.setup_kernel(cleanup_kc=True, env=environ):
                for index, cell in enumerate(notebook.cells):
                    client.execute_cell(cell, index)
                    if not goes_on and any(output.output_type == "error" for output in cell.outputs):
                        break
        except RuntimeError as error:
            if str(DENIED) in str(error):
                pytest.skip("this process may not have a network of its own")
            raise
        finally:
            shutil.rmtree(sockets)
        return Ran(notebook, asked.read_text() if asked.exists() else "")


@dataclass(frozen=True, slots=True)
class Ran:
    """An executed notebook. asked: who asked the network for what."""

    notebook: Any
    asked: str

    @property
    def text(self) -> str:
        """What it printed."""
        outputs = [output for cell in self.notebook.cells for output in cell.get("outputs", ())]
        return "".join(output.get("text", "") for output in outputs)

    @property
    def errors(self) -> list[str]:
        """Name and text of the errors with which cells ended."""
        outputs = [output for cell in self.notebook.cells for output in cell.get("outputs", ())]
        return [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]


KAGGLE = Machine("Kaggle, interactive", (("KAGGLE_KERNEL_RUN_TYPE", "Interactive"),), KAGGLE_PACKAGES)
KAGGLE_BATCH = Machine("Kaggle, batch", (("KAGGLE_KERNEL_RUN_TYPE", "Batch"),), KAGGLE_PACKAGES)
COLABS = Machine("Colab", (("COLAB_RELEASE_TAG", "release-colab_20260819"), ("COLAB_GPU", "0")), COLAB)
MACHINES = (KAGGLE, KAGGLE_BATCH, COLABS)
