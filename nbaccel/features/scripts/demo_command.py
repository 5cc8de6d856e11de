"""`nbaccel demo`: executes the quickstart notebook without a browser and reports the result. Runs in a terminal.

The notebook runs in its own kernel, as a person would run it; this file reads only its outputs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nbaccel.output.terminal import failed

__all__ = ["add_arguments"]

QUICKSTART = Path("notebooks/01_quickstart.ipynb")
PARAMETERS = "parameters"
"""Tag of the cell after which the demo sets `num_processes`, as papermill does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command and its arguments to `parser`."""
    parser.set_defaults(command=_demo)
    parser.add_argument("--notebook", type=Path, default=QUICKSTART, metavar="PATH", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="PATH", help="default: build/NAME.executed.ipynb")
    parser.add_argument("-n", "--num-processes", type=int, default=2, metavar="N", help="ranks; default: %(default)s")


def _demo(arguments: argparse.Namespace) -> int:
    """Execute the notebook, save it with its outputs, and report its variable `accuracy`."""
    try:
        import nbformat
        from nbclient.exceptions import CellExecutionError
    except ImportError as missing:
        return failed(f"the demo needs {missing.name}: pip install 'nbaccel[demo]'")
    if not arguments.notebook.exists():
        return failed(
            f"{arguments.notebook} is not here: run the demo in a clone of the repository, or name --notebook"
        )
    notebook = nbformat.read(arguments.notebook, as_version=4)
    if not _set_num_processes(notebook, arguments.num_processes):
        return failed(f'{arguments.notebook} has no cell tagged "{PARAMETERS}" that says num_processes = …')
    output = arguments.output or Path("build", f"{arguments.notebook.stem}.executed.ipynb")

    print(
        f"running the cells of {arguments.notebook} in a kernel, with num_processes = {arguments.num_processes}: "
        "the one that trains does so in that many processes; some 10 seconds",
        flush=True,
    )
    start = time.perf_counter()
    try:
        with _kernel(notebook, arguments.notebook.parent) as client:
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            accuracy = _value(client, "accuracy")
    except CellExecutionError as error:
        return failed(f"a cell failed; its output is in {output}\n{error}")
    finally:
        output.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, output)
    print(f"accuracy {float(accuracy):.3f}")
    print(f"seconds  {time.perf_counter() - start:.1f}")
    print(f"executed notebook: {output}")
    print("next:")
    for command, purpose in _next_commands(arguments.notebook, output):
        print(f"  {command:60}  # {purpose}")
    return 0


def _next_commands(notebook: Path, output: Path) -> list[tuple[str, str]]:
    """Return three command lines that work where the demo was run, with the purpose of each."""
    return [
        (f"{_program('jupyter')} lab {output}", "see what it drew; change the model, run it again"),
        (f"{_program('jupyter')} lab {notebook.parent}", "more notebooks; %load_ext nbaccel works in yours, too"),
        (f"{_program('nbaccel')} doctor", "what nbaccel sees of this machine"),
    ]


def _program(name: str) -> str:
    """Return a program of this Python's environment for a shell: beside the interpreter, else by its name."""
    beside = Path(sys.executable).with_name(name)
    return os.path.relpath(beside) if beside.exists() else name


def _set_num_processes(notebook: Any, num_processes: int) -> bool:
    """Add a cell that sets `num_processes` after the notebook's own choice; return False if there is none."""
    import nbformat

    for index, cell in enumerate(notebook.cells):
        if PARAMETERS in cell.metadata.get("tags", ()):
            injected = nbformat.v4.new_code_cell(f"num_processes = {num_processes}")
            injected.metadata["tags"] = [f"injected-{PARAMETERS}"]
            notebook.cells.insert(index + 1, injected)
            return True
    return False


@contextmanager
def _kernel(notebook: Any, folder: Path) -> Iterator[Any]:
    """Yield a client of a new kernel of this very Python, in the notebook's folder; the kernel ends with the block."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(KernelSpecManager):  # a kernel that is registered for the user may be of another Python
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=command, display_name="Python 3", language="python")

    # Sockets of a private folder in place of TCP ports, of which ipykernel warns, in red, that others could listen.
    with tempfile.TemporaryDirectory(prefix="nbaccel-demo-") as private:
        manager = AsyncKernelManager(
            kernel_spec_manager=ThisPython(), transport="ipc", connection_file=str(Path(private, "kernel.json"))
        )
        client = NotebookClient(notebook, km=manager, timeout=600, resources={"metadata": {"path": str(folder)}})
        with client.setup_kernel(cleanup_kc=True):  # also a kernel whose manager was passed in
            yield client


def _value(client: Any, name: str) -> str:
    """Return what a variable of the kernel prints; the notebook is unchanged."""
    import nbformat

    cells = client.nb.cells
    cells.append(nbformat.v4.new_code_cell(f"print({name})"))
    try:
        client.execute_cell(cells[-1], len(cells) - 1)
        return "".join(output.get("text", "") for output in cells[-1].outputs)
    finally:
        cells.pop()
