"""The command `nbaccel`: `doctor` says what this machine offers, `config` what a folder's notebooks choose, and `demo`
watches a notebook train.

Runs in a terminal. Each command calls what the notebook calls; the notebook of the demo runs in a kernel of its
own, as a person would run it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["main"]

QUICKSTART = Path("notebooks/01_quickstart.ipynb")
PARAMETERS = "parameters"
"""Tag of the cell after which the demo sets `num_processes`, as papermill does it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    status: int = parsed.command(parsed)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbaccel", description="Train on every device of the machine from a notebook."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine offers, as plain text; touches no device")
    doctor.set_defaults(command=_doctor)

    config = commands.add_parser("config", help="what nbaccel.toml chooses for the notebooks of this folder")
    config.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="choose this too, and write the file")
    config.set_defaults(command=_config)

    demo = commands.add_parser("demo", help="run the quickstart notebook without a browser and say how it went")
    demo.add_argument("--notebook", type=Path, default=QUICKSTART, metavar="PATH", help="default: %(default)s")
    demo.add_argument("--output", type=Path, metavar="PATH", help="default: build/NAME.executed.ipynb")
    demo.add_argument("-n", "--num-processes", type=int, default=2, metavar="N", help="ranks; default: %(default)s")
    demo.set_defaults(command=_demo)
    return parser


def _doctor(_: argparse.Namespace) -> int:
    from nbaccel.hardware import Survey
    from nbaccel.launch.doctor import Facts, report
    from nbaccel.settings import RunSettings

    survey = Survey.take()
    print(report(survey, Facts.of_this_process(survey, checkpoint_dir=RunSettings.from_env().checkpoint_dir)))
    return 0


def _config(arguments: argparse.Namespace) -> int:
    """Say what the file chooses, after writing into it what was given."""
    from IPython.core.error import UsageError

    from nbaccel.configfile import FILE_NAME
    from nbaccel.notebook.configuration import Configuration

    configuration = Configuration()
    try:
        configuration.change(arguments.settings)
        print(configuration.save() if arguments.settings else f"{FILE_NAME}: {configuration}")
    except UsageError as error:
        return _fail(str(error))
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    """Execute the notebook, save it with its outputs, and report the `accuracy` that it leaves behind."""
    try:
        import nbformat
        from nbclient.exceptions import CellExecutionError
    except ImportError as missing:
        return _fail(f"the demo needs {missing.name}: pip install 'nbaccel[demo]'")
    if not arguments.notebook.exists():
        return _fail(f"{arguments.notebook} is not here: run the demo in a clone of the repository, or name --notebook")
    notebook = nbformat.read(arguments.notebook, as_version=4)
    if not _set_num_processes(notebook, arguments.num_processes):
        return _fail(f'{arguments.notebook} has no cell tagged "{PARAMETERS}" that says num_processes = …')
    output = arguments.output or Path("build", f"{arguments.notebook.stem}.executed.ipynb")

    print(f"running {arguments.notebook} with num_processes = {arguments.num_processes}", flush=True)
    start = time.perf_counter()
    try:
        with _kernel(notebook, arguments.notebook.parent) as client:
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            accuracy = _value(client, "accuracy")
    except CellExecutionError as error:
        return _fail(f"a cell failed; its output is in {output}\n{error}")
    finally:
        output.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, output)
    print(f"accuracy {float(accuracy):.3f}")
    print(f"seconds  {time.perf_counter() - start:.1f}")
    print(f"executed notebook: {output}")
    return 0


def _set_num_processes(notebook: Any, num_processes: int) -> bool:
    """Add a cell that sets it behind the one with the notebook's own choice; False if there is none."""
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
    """A client of a fresh kernel of this very Python, in the notebook's folder; the kernel ends with the block."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(KernelSpecManager):  # a kernel that is registered for the user may be of another Python
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=command, display_name="Python 3", language="python")

    manager = AsyncKernelManager(kernel_spec_manager=ThisPython())
    client = NotebookClient(notebook, km=manager, timeout=600, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel(cleanup_kc=True):  # also a kernel whose manager we brought
        yield client


def _value(client: Any, name: str) -> str:
    """What a variable of the kernel prints; leaves no trace in the notebook."""
    import nbformat

    cells = client.nb.cells
    cells.append(nbformat.v4.new_code_cell(f"print({name})"))
    try:
        client.execute_cell(cells[-1], len(cells) - 1)
        return "".join(output.get("text", "") for output in cells[-1].outputs)
    finally:
        cells.pop()


def _fail(message: str) -> int:
    print(f"nbaccel: {message}", file=sys.stderr)
    return 1
