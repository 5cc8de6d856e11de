"""Rewrite statements of the notebook to make a change that a trial has measured. In the kernel; returns text alone.

A statement is found by the line that has made the object, or by the last assignment to its name, in the cell of the
trial or in an earlier one, and is shown as a whole.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.features.speed.changes import NEED_WORKERS, SpeedChange

__all__ = ["NotebookCells", "PastedLine", "lines_to_paste"]

_LOADER = "DataLoader"
_POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory")
"""Parameters of torch's `DataLoader` in their order, as far as this module changes them."""

_MARK = "changes the training: {factor} times fewer steps"


@dataclass(frozen=True, slots=True)
class PastedLine:
    """One statement to paste.

    Args:
        place: "Cell In[3], line 5".
        text: As it must stand there.
        remark: What else there is to know; may be empty.
    """

    place: str
    text: str
    remark: str = ""

    def __str__(self) -> str:
        remark = f"  # {self.remark}" if self.remark else ""
        return f"{self.place}: {self.text}{remark}"


class NotebookCells:
    """The cells of a notebook, as trees that may be changed.

    Args:
        texts: By number, as typed; that of the running one is `running`.
        number_of: Returns the number of the cell that a file name of a traceback belongs to, None for a file that is no
            cell.
    """

    def __init__(self, texts: Mapping[int, str], running: int, number_of: Callable[[str], int | None]) -> None:
        self._trees = {number: tree for number, text in texts.items() if (tree := _tree(text)) is not None}
        self.running = running
        self._number_of = number_of
        self._changed: dict[tuple[int, int], tuple[ast.stmt, list[str]]] = {}

    def call_of(self, part: Mapping[str, Any], word: str) -> tuple[int, ast.stmt, ast.Call] | None:
        """Return the cell, the statement and the call that has made a part of the training; None if it is not found.

        Args:
            part: Its "name", or the "file" and "line" that have made it.
            word: How the called name ends.
        """
        number = self._number_of(str(part["file"])) if part["file"] else None
        if number is not None and number in self._trees:
            return self._first(number, _statements_at(self._trees[number], int(part["line"])), word)
        if part["name"]:
            for number, statement in self._assignments(str(part["name"])):
                if (found := self._first(number, [statement], word, str(part["name"]))) is not None:
                    return found
        alone = [
            (number, statement, call)
            for number, tree in self._trees.items()
            for statement in _statements(tree)
            for call in _calls(statement, word)
        ]
        return alone[0] if len(alone) == 1 else None

    def where_bound(self, name: str) -> tuple[int, ast.stmt] | None:
        """Return the cell and the statement that bind a name last, without those that prepare it."""
        return next(iter(self._assignments(name)), None) if name else None

    def note(self, number: int, statement: ast.stmt, remark: str = "") -> None:
        """Note that a statement was changed."""
        remarks = self._changed.setdefault((number, statement.lineno), (statement, []))[1]
        if remark:
            remarks.append(remark)

    def changed(self) -> list[PastedLine]:
        """Return the changed statements, in the order of the notebook."""
        return [
            PastedLine(_place(number, statement), _text(statement), ", ".join(remarks))
            for (number, _), (statement, remarks) in sorted(self._changed.items(), key=lambda item: item[0])
        ]

    def _first(
        self, number: int, statements: Sequence[ast.stmt], word: str, name: str = ""
    ) -> tuple[int, ast.stmt, ast.Call] | None:
        for statement in statements:
            if calls := _calls(_value_of(statement, name), word):
                return number, statement, calls[0]
        return None

    def _assignments(self, name: str) -> Iterator[tuple[int, ast.stmt]]:
        for number in sorted(self._trees, reverse=True):
            statements = _statements(self._trees[number], in_functions=False)
            for statement in sorted(statements, key=lambda each: -each.lineno):
                is_binding = isinstance(statement, ast.Assign | ast.AnnAssign) and _binds(statement, name)
                if is_binding and not _calls(statement, "prepare"):
                    yield number, statement


def lines_to_paste(change: SpeedChange, facts: Mapping[str, Any], cells: NotebookCells) -> list[PastedLine]:
    """Return the lines that make `change`.

    The trees of `cells` are changed.

    Args:
        facts: The facts of the training's parts, see `TrainingParts.facts`.
    """
    lines = [*_of_loader(change, facts.get("loader"), cells), *_of_optimizer(change, facts.get("optimizer"), cells)]
    lines = [*cells.changed(), *lines]
    model = facts.get("model") or {"name": ""}
    name = model["name"] or "model"
    added = [f"{name}.compile()"] * change.compiles
    added = [f"{name}.to(memory_format=torch.channels_last)"] * change.channels_last + added
    if added:
        bound = cells.where_bound(model["name"])
        place = "where the model is made, after it" if bound is None else f"after {_place(*bound)}"
        lines += [PastedLine(place, text) for text in added]
    if change.threads:
        lines.append(
            PastedLine(f"Cell In[{cells.running}], as its first line", f"torch.set_num_threads({change.threads})")
        )
    flags = [f"-n {change.ranks}"] * bool(change.ranks) + [f"-p {change.precision}"] * bool(change.precision)
    if flags:
        lines.append(PastedLine(f"Cell In[{cells.running}], in its %%accelerate line", " ".join(flags)))
    return lines


def _of_loader(change: SpeedChange, loader: Mapping[str, Any] | None, cells: NotebookCells) -> Iterator[PastedLine]:
    options = dict(change.loader)
    remark = ""
    if loader is not None and change.batch_factor > 1:
        options["batch_size"] = loader["batch_size"] * change.batch_factor
        remark = _MARK.format(factor=change.batch_factor)
    if not options or loader is None:
        return
    found = cells.call_of(loader, _LOADER)
    if found is None:
        words = ", ".join(f"{name}={value!r}" for name, value in options.items())
        yield PastedLine(f"where {loader['name'] or 'the loader'} is made", words, remark)
        return
    number, statement, call = found
    has_workers = bool(options.get("num_workers", loader["num_workers"]))
    set_arguments(call, options, _POSITIONS, removed=() if has_workers else NEED_WORKERS)
    cells.note(number, statement, remark)


def _of_optimizer(
    change: SpeedChange, optimizer: Mapping[str, Any] | None, cells: NotebookCells
) -> Iterator[PastedLine]:
    if not change.optimizer or optimizer is None:
        return
    found = cells.call_of(optimizer, str(optimizer["kind"]))
    if found is None:
        words = ", ".join(f"{name}={value!r}" for name, value in change.optimizer.items())
        yield PastedLine(f"where {optimizer['name'] or 'the optimizer'} is made", words)
        return
    number, statement, call = found
    set_arguments(call, change.optimizer, (), removed=("foreach",))
    cells.note(number, statement)


def set_arguments(
    call: ast.Call, options: Mapping[str, Any], positions: Sequence[str], removed: Sequence[str] = ()
) -> None:
    """Give a call other arguments: instead of those of the same name or at the same position, or behind the others.

    Example:
        >>> call = ast.parse("DataLoader(data, 32, shuffle=True, **more)").body[0].value
        >>> set_arguments(call, {"batch_size": 64, "num_workers": 2}, ("dataset", "batch_size"))
        >>> ast.unparse(call)
        "DataLoader(data, 64, shuffle=True, **{**more, 'num_workers': 2})"
    """
    call.keywords = [each for each in call.keywords if each.arg not in removed]
    for name, value in options.items():
        constant = ast.Constant(value)
        at = positions.index(name) if name in positions else len(call.args)
        if at < len(call.args) and not any(isinstance(each, ast.Starred) for each in call.args[: at + 1]):
            call.args[at] = constant
        elif known := [each for each in call.keywords if each.arg == name]:
            known[0].value = constant
        elif more := [each for each in call.keywords if each.arg is None]:
            last = more[-1]
            if not isinstance(last.value, ast.Dict) or last.value.keys[:1] != [None]:
                last.value = ast.Dict([None], [last.value])
            last.value.keys.append(ast.Constant(name))
            last.value.values.append(constant)
        else:
            call.keywords.append(ast.keyword(name, constant))


def _tree(text: str) -> ast.Module | None:
    """Return the tree of a cell as typed, with empty lines for its magics; None if it is not Python."""
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.splitlines()]
    try:
        return ast.parse("\n".join(lines))
    except (SyntaxError, ValueError):  # shell commands inside of blocks, or another language
        return None


def _statements(node: ast.AST, in_functions: bool = True) -> Iterator[ast.stmt]:
    """Yield the statements of a cell.

    Args:
        in_functions: Also those in functions and classes, which bind other names.
    """
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.stmt):
            yield part
        if in_functions or not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _statements(part, in_functions)


def _statements_at(tree: ast.AST, line: int) -> list[ast.stmt]:
    """Return the statements that a line belongs to, the innermost first."""
    found = [each for each in _statements(tree) if each.lineno <= line <= (each.end_lineno or each.lineno)]
    return sorted(found, key=lambda each: -each.lineno)


def _calls(node: ast.AST | None, word: str) -> list[ast.Call]:
    """Return the calls in a statement, without those in statements inside of it, whose function's name ends so."""
    found: list[ast.Call] = []
    for part in [] if node is None else [node, *_own_parts(node)]:
        if isinstance(part, ast.Call):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
            if name.endswith(word):
                found.append(part)
    return found


def _own_parts(node: ast.AST) -> Iterator[ast.AST]:
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, ast.stmt):
            yield part
            yield from _own_parts(part)


def _value_of(statement: ast.stmt, name: str) -> ast.AST:
    """Return what a statement binds to a name: of `a, b = f(), g()` one of both, otherwise the whole statement."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple):
        for target in statement.targets:
            if isinstance(target, ast.Tuple) and len(target.elts) == len(statement.value.elts):
                for each, value in zip(target.elts, statement.value.elts, strict=True):
                    if isinstance(each, ast.Name) and each.id == name:
                        return value
    return statement


def _binds(statement: ast.stmt, name: str) -> bool:
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", statement)]
    leaves = [leaf for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
    return any(leaf.id == name and isinstance(leaf.ctx, ast.Store) for leaf in leaves)


def _place(number: int, statement: ast.stmt) -> str:
    return f"Cell In[{number}], line {statement.lineno}"


def _text(statement: ast.stmt) -> str:
    """Return a statement; of one with a body the line above it."""
    if hasattr(statement, "body"):
        lines = ast.unparse(statement).splitlines()
        first = ast.unparse(statement.body[0]).splitlines()[0]  # of a string, it would be another text
        return "\n".join(lines[: next(at for at, line in enumerate(lines) if at and line.strip() == first.strip())])
    return ast.unparse(statement)
