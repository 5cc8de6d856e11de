"""The lines of earlier cells that made a model which ranks cannot get, and the refusal that names them. In the kernel.

It is loaded where the notebook has such a model, or one that is copied to ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbaccel.base.quantities import listed, plural
from nbaccel.errors import LaunchRefused
from nbaccel.launching.earlier_models import LOADER, EarlierModel
from nbaccel.launching.tasks.cell_code import tree_as_typed

__all__ = ["MadeAt", "refuse_what_stays_here", "where_made"]

_MAP = "device_map"
_OWN_DEVICE = ast.parse("{'': accelerator.device}", mode="eval").body
_LONGEST_LINE = 160
_ACCELERATOR = "accelerator = Accelerator()"


@dataclass(frozen=True, slots=True)
class MadeAt:
    """The place where the notebook made a name: the cell's number, the line in it (from 1) and its text."""

    cell: int
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line} of Cell In[{self.cell}], `{self.text}`"


def refuse_what_stays_here(
    models: Sequence[EarlierModel], ranks: int, history: Sequence[str], where: str = "this cell", one: str = "-n 1"
) -> None:
    """Refuse a run whose ranks would need a model that cannot leave this process.

    Args:
        history: The notebook's cells, as typed; a cell's number is its index.
        where: What the ranks run, in words.
        one: How to ask for one process.

    Raises:
        LaunchRefused: With the lines that load the model in the ranks.
    """
    model = next((model for model in models if model.stays_here), None)
    if model is None:
        return
    if model.is_quantised:
        why = "its weights cannot be sent to ranks. Each rank has to load it onto its own device"
    else:
        why = f"{plural(ranks, 'rank')} {'needs' if ranks == 1 else 'need'} it whole, each on one device"
    owner = model.own_name or f"the {model.kind}"
    owner = owner if owner == model.name else f"{owner} in {model.name}"
    raise LaunchRefused(
        f"{owner} {model}: {why}. {_remedy(model, history, where)}\n"
        f"Nothing was copied or started. One process takes it as it is: {one}, and no --start."
    )


def _remedy(model: EarlierModel, history: Sequence[str], where: str) -> str:
    """Return the sentence that says what to move, and the lines as they have to be there."""
    name = model.own_name or model.name
    loading = _loading(name, history)
    last = where_made(name, history)
    later = [last] if loading is not None and last is not None and last != loading[0] else []
    if name != model.name and (holder := where_made(model.name, history)) is not None:
        later.append(holder)
    behind = f", and after it {listed([str(place) for place in later])}" if later else ""
    if loading is not None:
        return f"Move {loading[0]} into {where}{behind}:\n  {_ACCELERATOR}\n  {loading[1]}"
    if model.is_loaded:
        new = f"{model.own_name or 'model'} = {model.kind}.{LOADER}(..., {_MAP}={ast.unparse(_OWN_DEVICE)})"
        return f"Load it in {where}{behind}:\n  {_ACCELERATOR}\n  {new}"
    if last is not None:
        return f"Move {last} into {where}{behind}, onto accelerator.device:\n  {_ACCELERATOR}\n  {last.text}"
    return f"Make {name} in {where}, onto accelerator.device:\n  {_ACCELERATOR}\n  {name} = ..."


def where_made(name: str, history: Sequence[str]) -> MadeAt | None:
    """Return the last assignment to `name` in the notebook's cells; None if the text shows none.

    Example:
        >>> where_made("model", ["", "import torch", "x = 1\\nmodel = torch.nn.Linear(2, 1).cuda()"])
        MadeAt(cell=2, line=2, text='model = torch.nn.Linear(2, 1).cuda()')
    """
    return next((place for place, _ in _assignments(name, history)), None)


def _loading(name: str, history: Sequence[str]) -> tuple[MadeAt, str] | None:
    """Return the last assignment to `name` that loads a model, and the same one onto the rank's own device."""
    for place, node in _assignments(name, history):
        calls = (part for part in ast.walk(node.value) if isinstance(part, ast.Call))
        call = next((call for call in calls if _loads(call)), None)
        if call is None:
            continue
        call.keywords = [*(word for word in call.keywords if word.arg != _MAP), ast.keyword(_MAP, _OWN_DEVICE)]
        if len(line := ast.unparse(node)) > _LONGEST_LINE:
            call.args, call.keywords = [ast.Constant(...)], call.keywords[-1:]
            line = ast.unparse(node)
        return place, line
    return None


def _loads(call: ast.Call) -> bool:
    is_loader = isinstance(call.func, ast.Attribute) and call.func.attr == LOADER
    return is_loader or any(word.arg == _MAP for word in call.keywords)


def _assignments(name: str, history: Sequence[str]) -> Iterator[tuple[MadeAt, ast.Assign]]:
    """Yield the assignments to `name` in the notebook's cells, the last one first."""
    for number in range(len(history) - 1, 0, -1):
        tree = tree_as_typed(history[number])
        if tree is None:
            continue
        lines = history[number].splitlines()
        nodes = [node for node in _of_the_notebook(tree) if isinstance(node, ast.Assign) and _binds(node, name)]
        for node in reversed(nodes):
            yield MadeAt(number, node.lineno, lines[node.lineno - 1].strip()), node


def _of_the_notebook(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a cell in their order, without those in functions and classes, which bind other names."""
    for part in ast.iter_child_nodes(node):
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _of_the_notebook(part)


def _binds(node: ast.Assign, name: str) -> bool:
    leaves = [leaf for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
    return any(leaf.id == name and isinstance(leaf.ctx, ast.Store) for leaf in leaves)  # not `name.attribute = ...`
