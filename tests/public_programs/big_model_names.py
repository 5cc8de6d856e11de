"""Count the names of Accelerate's big-model API that public programs use, and look each up in nbaccel.

`programs.toml` names the programs. They are read and not run: most need GPUs, kernels for quantised weights, and models
that are downloaded. Accelerate says which of its names belong to that API, so it has to be installed.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from public_programs.copies import notebook_script
from public_programs.manifest import BigModelProgram, Manifest

__all__ = ["names_table", "standing", "used_names"]

_DOTTED = re.compile(r"accelerate(?:\.\w+)+")
_BIG_MODELS = ("big_modeling", "hooks", "inference", "utils.bnb", "utils.modeling", "utils.offload")
"""Modules of Accelerate that define the names of the API; others show them too."""


def used_names(source: str) -> set[str]:
    """Return what `source` takes from accelerate, each with the module that it names.

    >>> sorted(used_names("from accelerate.hooks import ModelHook as Hook; accelerate.dispatch_model(model)"))
    ['accelerate.dispatch_model', 'accelerate.hooks.ModelHook']
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accelerate":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and _DOTTED.fullmatch(dotted := ast.unparse(node)):
            found.add(dotted)
    return found


def standing(name: str) -> str:
    """Return "here" if nbaccel has `name`, a dotted name of accelerate; else the sentence by which it is refused."""
    module, _, leaf = name.replace("accelerate", "nbaccel", 1).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), leaf)
    except (AttributeError, ImportError) as error:
        return str(error)
    text = getattr(found, "__doc__", None) or ""
    return text if text.startswith("Not here") else "here"


def names_table(manifest: Manifest) -> Iterator[str]:
    """Yield a Markdown table, a line per name with the programs that use it, and the sums."""
    users = _users(manifest.big_models, manifest)
    yield "| name | programs | used by | nbaccel |"
    yield "|---|---|---|---|"
    rows = sorted(users.items(), key=lambda row: (-len(row[1]), row[0]))
    for name, programs in rows:
        yield f"| {name} | {len(programs)} | {', '.join(sorted(programs))} | {standing(name)} |"
    absent = sum(standing(name) != "here" for name, _ in rows)
    programs = {program for _, several in rows for program in several}
    yield ""
    yield f"{len(programs)} programs use {len(rows)} names of the big-model API; {absent} of them are not here."


def _users(programs: Iterable[BigModelProgram], manifest: Manifest) -> Mapping[str, set[str]]:
    """Return for each name of the big-model API the repositories of the programs that use it."""
    users: dict[str, set[str]] = {}
    for program in programs:
        for path in program.paths:
            sources = _sources(manifest.repository(program.repository) / path)
            for name in {_of_big_models(name) for source in sources for name in used_names(source)} - {""}:
                users.setdefault(name, set()).add(program.repository)
    return users


def _sources(path: Path) -> Iterator[str]:
    """Yield the Python in a script, or in each cell of a notebook that has nothing else."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        yield text
        return
    for cell in json.loads(text)["cells"]:
        source = notebook_script(json.dumps({"cells": [cell]}))
        with suppress(SyntaxError):  # a command of the shell that goes over several lines
            ast.parse(source)
            yield source


def _of_big_models(name: str) -> str:
    """Return `name` under the module that defines it if it belongs to the API, else nothing."""
    module, _, leaf = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), leaf)
    except (AttributeError, ImportError):  # of an older Accelerate
        return ""
    home = getattr(found, "__module__", "")
    return f"{home}.{leaf}" if home.removeprefix("accelerate.") in _BIG_MODELS else ""
