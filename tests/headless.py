"""Notebooks executed without a browser, by nbclient, in a chosen environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.client import CellExecutionComplete
from nbclient.util import ensure_async

from environments import Environment

__all__ = ["execute"]


class CellsGoOn(NotebookClient):
    """A client as a browser is: what comes for a cell after its end goes into that cell, too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cells: dict[str, tuple[Any, int]] = {}  # by the message that asked for the execution

    async def _async_poll_output_msg(self, parent_msg_id: str, cell: Any, cell_index: int) -> None:
        self._cells[parent_msg_id] = cell, cell_index
        assert self.kc is not None
        while True:
            message = await ensure_async(self.kc.iopub_channel.get_msg(timeout=None))
            parent = message["parent_header"].get("msg_id")
            if parent not in self._cells:
                continue
            try:
                self.process_message(message, *self._cells[parent])
            except CellExecutionComplete:
                if parent == parent_msg_id:
                    return


def execute(
    notebook: Any,
    environment: Environment,
    folder: Path,
    timeout_s: int = 120,
    *,
    can_answer: bool = False,
    **traits: Any,
) -> None:
    """Run every cell of `notebook` in a fresh kernel of `environment`; outputs go into the notebook.

    folder: the kernel's working directory.  can_answer: cells see a front end with a person at it, so that runs in the
    background go on there.  traits: of the kernel's manager.

    Raises:
        CellExecutionError: a cell failed; the cells behind it have not run.
    """
    spec = KernelSpec(argv=environment.kernel_argv, display_name=environment.name, language="python")

    class OnlyThisKernel(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return spec

    manager = AsyncKernelManager(kernel_spec_manager=OnlyThisKernel(), **traits)
    client = CellsGoOn(notebook, km=manager, timeout=timeout_s, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel(cleanup_kc=True):  # also the sockets of a manager that we brought
        assert client.kc is not None
        client.kc.allow_stdin = can_answer
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
