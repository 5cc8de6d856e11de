"""Copies of a repository, one per library: in nbaccel's the import is changed."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["change_import", "copy_of", "notebook_script", "with_settings"]

_IMPORT = re.compile(r"^(\s*)(?:from\s+accelerate\b|import\s+accelerate\b(\.\S+)?(\s+as\s+\w+)?)", re.MULTILINE)


def change_import(source: str, library: str) -> str:
    """`source` with accelerate imported from `library`; the names that it uses stay as they are."""

    def changed(found: re.Match[str]) -> str:
        indent, submodule, alias = found.groups()
        if found[0].lstrip().startswith("from"):
            return f"{indent}from {library}"
        if submodule and not alias:  # `import accelerate.utils` binds `accelerate`
            return f"{indent}import {library}{submodule}, {library} as accelerate"
        return f"{indent}import {library}{submodule or ''}{alias or ' as accelerate'}"

    return source if library == "accelerate" else _IMPORT.sub(changed, source)


def with_settings(source: str, settings: Mapping[str, str]) -> str:
    """`source` with other values of constants, so that a program ends in seconds.

    Raises:
        ValueError: a constant is not assigned on a line of its own.
    """
    for name, value in settings.items():
        source, count = re.subn(
            rf"^(\s*{name}\s*=\s*)[^=].*$", lambda found, v=value: found[1] + v, source, flags=re.MULTILINE
        )  # type: ignore[misc]
        if not count:
            raise ValueError(f"no line assigns {name}")
    return source


def notebook_script(text: str, skip_cells: Sequence[str] = ()) -> str:
    """The code cells of a notebook but those with one of `skip_cells`, without what only IPython understands."""
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    kept = [cell for cell in cells if not cell.startswith("%%") and not any(words in cell for words in skip_cells)]
    return "\n".join(re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in "\n\n".join(kept).split("\n"))


def copy_of(repository: Path, copies: Path, library: str) -> Path:
    """The copy of `repository` for `library`, made when it is not there yet."""
    copy = copies / library / repository.name
    if copy.is_dir():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", dir=copy.parent))
    without_history = shutil.ignore_patterns(".git")
    shutil.copytree(repository, unfinished, symlinks=True, ignore=without_history, dirs_exist_ok=True)
    for path in unfinished.rglob("*.py"):
        if path.is_file() and not path.is_symlink():
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            path.write_text(change_import(text, library), encoding="utf-8", errors="surrogateescape")
    try:
        unfinished.rename(copy)
    except OSError:  # another call has made it meanwhile
        shutil.rmtree(unfinished)
    return copy
