"""Notebooks executed without a browser, by nbclient, in a chosen environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from environments import Environment

__all__ = ["execute"]


def execute(notebook: Any, environment: Environment, folder: Path, timeout_s: int = 120, **traits: Any) -> None:
    """Run every cell of `notebook` in a fresh kernel of `environment`; outputs go into the notebook.

    folder: the kernel's working directory.  traits: of the kernel's manager.

    Raises:
        CellExecutionError: a cell failed; the cells behind it have not run.
    """
    spec = KernelSpec(argv=environment.kernel_argv, display_name=environment.name, language="python")

    class OnlyThisKernel(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return spec

    manager = AsyncKernelManager(kernel_spec_manager=OnlyThisKernel(), **traits)
    client = NotebookClient(notebook, km=manager, timeout=timeout_s, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel(cleanup_kc=True):  # also the sockets of a manager that we brought
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
