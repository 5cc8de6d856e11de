"""Execute the notebooks and store them with their outputs: the command behind ``make notebooks``.

    python tests/stored_notebooks.py [notebooks/01_quickstart.ipynb ...]

A visitor who has installed nothing sees what they do. What is stored is made to be compared and to be small: no times
of cells, no names of temporary folders, no versions of this machine, and pictures of few colours: those of a run as
they were drawn, since another palette would lose curves. A digest of sources and outputs stands in the metadata;
`belongs_together` says whether it still holds, so that nobody edits one without the other. Losses, seconds and pictures
are those of the last execution.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

from environments import NEWEST, REPOSITORY
from headless import execute

__all__ = ["BY_HAND", "MOST_BYTES", "NOTEBOOKS", "belongs_together", "presentable", "store"]

BY_HAND = ("kaggle_two_t4.ipynb",)
"""Notebooks that need what this machine lacks, and are stored without outputs."""

NOTEBOOKS = tuple(sorted(path for path in (REPOSITORY / "notebooks").glob("*.ipynb") if path.name not in BY_HAND))

MOST_BYTES = 400_000
"""Of a stored notebook."""

_COLOURS = 16
_WIDTH = 760
"""Pixels of the widest picture: what pages that show notebooks have room for."""
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_WIDGET = "application/vnd.jupyter.widget-view+json"
"""A bar of tqdm in the notebook's own process: pages without a kernel cannot show it, and its text says 0 %."""
_MEASURED = "what_it_costs.json"
_DIGEST = "executed"
_RANDOM_FOLDER = re.compile(rf"({re.escape(tempfile.gettempdir())}/[\w-]*?)[a-z0-9_]{{8}}(?=[/\s'\",;)]|$)")
_INSTALLED = re.compile(r"(?:/[\w.+-]+)+?/(?=(?:site-packages|nbaccel)/)")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def store(path: Path) -> None:
    """Execute the notebook in a fresh kernel and write it back with what it showed.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the file stays as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as private:
        # The working directory: what notebooks save goes with it. And sockets, since ipykernel warns of TCP ports.
        Path(folder, _MEASURED).symlink_to(path.parent / _MEASURED)
        execute(
            notebook,
            NEWEST,
            Path(folder),
            timeout_s=300,
            can_answer=True,
            transport="ipc",
            connection_file=f"{private}/kernel.json",
        )
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                shown = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]
                cell.outputs = [presentable(output, folder) for output in shown]
    notebook.metadata = nbformat.from_dict(_METADATA | {"nbaccel": {_DIGEST: _digest(notebook)}})
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def belongs_together(notebook: Any) -> bool:
    """Return whether outputs and sources are those of one execution by `store`."""
    return bool(notebook.metadata.get("nbaccel", {}).get(_DIGEST) == _digest(notebook))


def _digest(notebook: Any) -> str:
    cells = [[cell.source, cell.outputs, cell.execution_count] for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def presentable(output: Any, folder: str) -> Any:
    """The output without what is of this machine and this minute alone."""
    if "text" in output:
        output.text = _plain(output.text, folder)
    if "traceback" in output:
        output.traceback = [_plain(line, folder) for line in output.traceback]
        output.evalue = _plain(output.evalue, folder)
    is_ours = "alt" in (output.get("metadata", {}).get("image/png") or {})  # it has few colours, its own ones
    for mime, value in output.get("data", {}).items():
        if mime != "image/png":
            output.data[mime] = _plain(value, folder)
        elif not is_ours:
            output.data[mime] = _small(value)
    for described in output.get("metadata", {}).values():
        if isinstance(described, dict) and "alt" in described:  # what a picture shows, in words
            described["alt"] = _plain(described["alt"], folder)
    return output


def _plain(text: Any, folder: str) -> Any:
    if not isinstance(text, str):  # the JSON of a widget or a table
        return text
    text = _RANDOM_FOLDER.sub(r"\1…", text.replace(folder, "."))
    text = _INSTALLED.sub("", text).replace(f"{REPOSITORY}/", "")
    text = text.replace(os.path.expanduser("~"), "~")
    return _ADDRESS.sub("0x…", text)


def _small(picture: str) -> str:
    """The PNG as wide as a page and with few colours, which is what curves have: a quarter of its bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    is_transparent = "transparency" in image.info or image.mode == "RGBA"
    image = image.convert("RGBA" if is_transparent else "RGB")
    if image.width > _WIDTH:
        image = image.resize((_WIDTH, round(image.height * _WIDTH / image.width)), Image.Resampling.LANCZOS)
    method = Image.Quantize.FASTOCTREE if is_transparent else Image.Quantize.MEDIANCUT
    content = io.BytesIO()
    image.quantize(_COLOURS, method=method, dither=Image.Dither.NONE).save(content, "png", optimize=True)
    return base64.b64encode(content.getvalue()).decode()


def _write_the_compatibility_page() -> None:
    """Its sources are made by a program, which is run first."""
    spec = importlib.util.spec_from_file_location("compatibility", REPOSITORY / "notebooks" / "compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compatibility"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.PAGE.write_text(module.text(), encoding="utf-8")


def main() -> int:
    """Store the notebooks that the command line names, or all of them."""
    # As for the tests of notebooks 04 and 06: bits that do not depend on the processor, threads that do not spin.
    os.environ.update(MKL_CBWR="COMPATIBLE", OMP_WAIT_POLICY="PASSIVE", KMP_BLOCKTIME="0")
    with tempfile.TemporaryDirectory() as profile:
        os.environ["IPYTHONDIR"] = profile  # nobody's start-up files
        _store_all([Path(name).resolve() for name in sys.argv[1:]] or NOTEBOOKS)
    return 0


def _store_all(paths: Sequence[Path]) -> None:
    for path in paths:
        start = time.perf_counter()
        if path.stem == "03_accelerate_compatibility":
            _write_the_compatibility_page()
        store(path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
