"""A cell with `--sweep`: it runs once for each configuration, some side by side. Runs in the kernel.

The values of a configuration are set in the rank before the first line of the cell. `--out score` leaves in the
notebook a list `score`, in the order of the configurations, with None for a run that failed, or that was stopped before
it had assigned `score`; nothing else comes back.
The cell ends well, whatever its runs do, unless it is interrupted.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbaccel.base.quantities import plural
from nbaccel.errors import LaunchRefused, ResultsMissing
from nbaccel.features.source.source_mark import SourceMark
from nbaccel.features.sweep.swept_values import BareWord
from nbaccel.launching.ipc.spec import Task
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import RESULT, CellTask
from nbaccel.namespace.names import READ_BY_TEXT, made_before_read, names_in_magics, names_read, with_their_own
from nbaccel.options.parsing import SweptName
from nbaccel.options.run_options import RunOptions

__all__ = [
    "SweptCell",
    "bound_at",
    "changed_at",
    "lines_of_lists",
    "lists_of",
    "refuse_bound_names",
    "values_to_sweep",
]

_SEED, _ACCELERATOR = "seed", "accelerator"
_LARGEST_SEED = 2**32 - 1
_ADDS = frozenset({"append", "extend", "insert", "add", "update", "setdefault"})
"""Methods by which a loop collects its results."""


class SweptCell:
    """A cell as the work of a sweep.

    Args:
        options: With the seed of every run, unless it is swept.
        setup: See `Session`.
        how_it_ended: See `cell_run.how_a_cell_ended`.
    """

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        options: RunOptions,
        configs: Sequence[Mapping[str, Any]],
        setup: str | None,
        how_it_ended: Callable[[Run, RankResults, LaunchPlan], tuple[BaseException | None, str]],
    ) -> None:
        names = configs[0].keys()
        refuse_bound_names(source.code, names)
        self._configs = configs
        _refuse_wrong_seeds(configs)
        self.name = source.name
        self.setup = setup
        self.plan: LaunchPlan | None = None
        self._how_it_ended = how_it_ended
        self._cell = source
        self._namespace = namespace
        self._out = options.names_back or ()
        self._inputs = options.inputs or ()
        self._seed = None if _SEED in names else options.seed
        own = {*names, _ACCELERATOR, *made_before_read(source.code, namespace)}
        read = {name: value for name, value in namespace.items() if name not in own}
        self.source = SourceMark.of_cell(source.code, source.compile(), read).digest + ",".join(self._out)

    def task(self, config: Mapping[str, Any]) -> Task:
        cell = replace(self._cell, code=with_values(self._cell.code, config))
        return CellTask(cell, self._namespace, self._out, self._inputs)

    def seed_of(self, config: Mapping[str, Any]) -> int | None:
        return int(config[_SEED]) if _SEED in config else self._seed

    def results(self, ended: RankResults) -> tuple[list[Any], dict[str, Any]]:
        values = ended.returned().values
        left = {name: values[name] for name in self._out if name in values}
        return [values.get(RESULT), *[None] * (len(ended.reports) - 1)], left

    def notes(self) -> Iterator[str]:
        """Yield lines before the runs on names whose values may not be meant so."""
        parts = self._cell.compile()
        read = with_their_own(names_read(parts) | names_in_magics(self._cell.code), self._namespace)
        for name, value in self._configs[0].items():
            if name not in read and name != _SEED and not read & READ_BY_TEXT:
                near = difflib.get_close_matches(name, read - vars(builtins).keys(), n=1)
                yield (
                    f"{name} is swept, and nothing in the cell reads it: runs that differ in it alone are equal"
                    f"{f' (did you mean {near[0]}?)' if near else ''}"
                )
            is_alone = all(config[name] is value for config in self._configs)
            if type(value) is list and len(value) > 1 and is_alone:
                yield f"{name}={value} is one value; {len(value)} are {name}={','.join(map(repr, value))}"

    def lines(self, runs: Sequence[Run], left: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield the lines on what came back, see `lines_of_lists`."""
        return lines_of_lists(runs, left, self._out, self._cell.code, self._namespace)

    def end(self, run: Run, ended: RankResults) -> tuple[BaseException | None, str]:
        assert self.plan is not None, "a cell is planned before it runs"
        error, word = self._how_it_ended(run, ended, self.plan)
        report = ended.reports[ended.task.result_rank]
        missing = {} if report is None else {name: report.missing[name] for name in self._out if name in report.missing}
        if error is None and word == "done" and missing:
            reasons = ", ".join(f"{name} ({why})" for name, why in missing.items())
            return ResultsMissing(f"of --out this did not come: {reasons}", missing), "failed"
        return error, word


def with_values(code: str, config: Mapping[str, Any]) -> str:
    """Return the code of a cell with the values set before it, in the line of the notebook that has the magic.

    Example:
        >>> with_values("\\nprint(lr)\\n", {"lr": 0.1, "fold": 2})
        'lr = 0.1; fold = 2\\nprint(lr)\\n'
    """
    first, _, rest = code.partition("\n")
    assert not first.strip(), "the first line of a cell of ranks is that of the magic"
    return f"{'; '.join(f'{name} = {_as_literal(value)}' for name, value in config.items())}\n{rest}"


def _as_literal(value: Any) -> str:
    """Return a value as Python that needs no name.

    Example:
        >>> _as_literal(float("inf")), _as_literal([1, 2])
        ('1e999', '[1, 2]')
    """
    if type(value) is float and not math.isfinite(value):
        return {"inf": "1e999", "-inf": "-1e999"}.get(repr(value), "1e999 - 1e999")
    return repr(value)


def values_to_sweep(swept: Sequence[SweptName], namespace: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of `--sweep` by name.

    Raises:
        LaunchRefused: A word is the name of several values in the notebook.
    """
    for name, values in swept:
        for value in values:
            held = namespace.get(value) if isinstance(value, BareWord) else None
            dimensions = getattr(held, "ndim", 0)
            if isinstance(held, list | tuple | range) or (type(dimensions) is int and dimensions > 0):
                raise LaunchRefused(
                    f"--sweep {name}={value}: {value} is the name of a {type(held).__name__} in the notebook, and here "
                    f"it would be the text '{value}'. Write its values with commas, or use nbaccel.sweep(train, "
                    f"{name}={value}); for the text, put it into quotes. Nothing was started."
                )
    return {name: [str(each) if isinstance(each, BareWord) else each for each in values] for name, values in swept}


def lists_of(runs: Sequence[Run], left: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return for each name of `--out` its values in the order of the runs, None for a run that failed or left none.

    Args:
        left: What each run has left, by name.
    """
    pairs = list(zip(runs, left, strict=True))
    return {name: [values.get(name) if run.error is None else None for run, values in pairs] for name in names}


def lines_of_lists(
    runs: Sequence[Run],
    left: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    code: str,
    namespace: Mapping[str, Any],
) -> Iterator[str]:
    """Yield the lines on what came back, and on what a reader of the cell may miss.

    Args:
        left: What each run has left, by name.
        names: Those of `--out`.
        code: The cell.
        namespace: That of the notebook.
    """
    tree = ast.parse(code)
    if names:
        yield _line_of_lists(runs, left, names)
    elif example := _last_assigned(tree):
        yield f"nothing was brought back: --out {example} would leave a list of {len(runs)}"
    own = {*names, *(name for name, _ in bound_at(tree))}
    if changed := [
        name for name in changed_at(tree) if name not in own and isinstance(namespace.get(name), list | dict | set)
    ]:
        yield (
            f"not brought back: {', '.join(changed)}, which each run has changed for itself; give the value a name of "
            "its own in the cell, for --out"
        )


def _line_of_lists(runs: Sequence[Run], left: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    lost = sum(run.error is not None for run in runs)
    early = sum(run.error is None and not values.keys() >= set(names) for run, values in zip(runs, left, strict=True))
    of = names[0] if len(names) == 1 else "all of them"
    why = [f"None for {plural(lost, 'run')} that did not end well"] if lost else []
    why += [f"None for {plural(early, 'run')} stopped before it had assigned {of}"] if early else []
    each = "a list" if len(names) == 1 else "lists"
    return f"brought back: {', '.join(names)} ({', '.join([f'{each} of {len(runs)}', *why])})"


def _last_assigned(tree: ast.Module) -> str:
    """Return the name that the cell assigns last, outside of loops; empty if its last line is a value, or if none."""
    if not tree.body or isinstance(tree.body[-1], ast.Expr):
        return ""
    names = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    return names[-1] if names else ""


def changed_at(tree: ast.AST) -> list[str]:
    """Return the names whose lists, dicts or sets the top level of a module adds to.

    Example:
        >>> changed_at(ast.parse("scores.append(acc)\\nbest[fold] = acc\\ndef f(): inner.append(1)"))
        ['scores', 'best']
    """
    found: list[str] = []
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                continue
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _ADDS:
                found.append(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                found.append(name)
        found += changed_at(node)
    return list(dict.fromkeys(found))


# --- what is refused ------------------------------------------------------------------------------------------------


def _refuse_wrong_seeds(configs: Sequence[Mapping[str, Any]]) -> None:
    for config in configs:
        seed = config.get(_SEED, 0)
        if type(seed) is not int or not 0 <= seed <= _LARGEST_SEED:
            raise LaunchRefused(f"--sweep seed: a seed is a whole number from 0 on; got {seed!r}. Nothing was started.")


def refuse_bound_names(code: str, names: Collection[str]) -> None:
    """Refuse a cell whose top level binds a swept name: each run would compute with the cell's value.

    Raises:
        LaunchRefused: With the line.
        SyntaxError: It is no Python.
    """
    tree = ast.parse(code)
    lines = code.splitlines()
    for name, line in bound_at(tree):
        if name in names:
            raise LaunchRefused(
                f"line {line} of the cell binds {name}, which --sweep sets for each run: {lines[line - 1].strip()}\n"
                f"  Delete that line, or take {name} out of --sweep. Nothing was started."
            )
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            raise LaunchRefused(
                f"line {node.lineno} of the cell has to be its first statement, and --sweep sets values before it: put "
                "the __future__ import into a cell of its own, above this one."
            )


def bound_at(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that the top level of a module binds or deletes, in any way, with its line.

    Example:
        >>> list(bound_at(ast.parse("for i in [(j := 2)]: pass\\ndef f(a): b = 1\\n[k for k in ()]")))
        [('i', 1), ('j', 1), ('f', 2)]
    """
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
                outside: list[ast.AST] = [*node.decorator_list]
                if not isinstance(node, ast.ClassDef):
                    outside += [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
                for part in outside:
                    yield from bound_at(ast.Expression(part))  # type: ignore[arg-type]
                continue
            case ast.Lambda():
                continue
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for inner in ast.walk(node):  # its own names stay in it, those of `:=` do not
                    if isinstance(inner, ast.NamedExpr):
                        yield inner.target.id, inner.lineno
                continue
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield node.id, node.lineno
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield alias.asname or alias.name.partition(".")[0], node.lineno
            case ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name):
                yield name, node.lineno
            case ast.MatchStar(name=str() as name) | ast.MatchMapping(rest=str() as name):
                yield name, node.lineno
        yield from bound_at(node)
