"""Find numbers that a program makes of a rank's part of its batches, by reading its source once. Runs in ranks.

A loss has the whole batch's value after its backward, and ``len(x)`` is that of a rank's part. So of N ranks
``loss.item() / len(x)`` is N times what one process computes, and ``correct / len(dataset)`` an N-th of it: Python's
numbers cannot be followed while they are computed, so the program is read before. Each value gets a power of N,
`Known.power`; products add powers. What is printed, kept in a list, or left in a name is a number that somebody reads.

A loop that decides by such a number (``if mask.sum() > 8: continue``) decides otherwise with parts of its batches, and
all ranks alike may: its batches stay whole. Means need not: if those of all parts are larger than a limit, that of the
batch is, too; and ranks that decide differently are out of step, which is an error. So it is with counts and 0. Whole
batches are also for a loop that multiplies its loss by a count, or scales its gradients or its learning rate by one.

Only loops whose batches were split are followed, and functions that the notebook's source defines. A value that a
library returns for a part is known to be of a part, and no more.
"""

from __future__ import annotations

import ast
import linecache
import operator as operators
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from nbaccel.base.notices import is_users
from nbaccel.train.distributed.callers import users_frames, variables_of
from nbaccel.train.raw_loop.node_kinds import names

__all__ = ["PartNumbers", "ReadNumber", "without_magics"]

_MAGIC = re.compile(r"^(\s*)[%!].*")
_DEEPEST = 6
_LONGEST = 60
_MOST_NAMED = 6
_MOST_FRAMES = 100

_SUMS = names("sum nansum count_nonzero numel nelement bincount")
_MEANS = names("mean nanmean std var median max min amax amin norm quantile")
_SHOWN_BY = names(
    "print write info debug warning log log_metric log_metrics add_scalar add_scalars set_postfix set_postfix_str "
    "set_description format display"
)
_KEEPS = names("item float int round abs detach cpu tolist numpy clone double to half sum mean max min array")
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operators.lt,
    ast.LtE: operators.le,
    ast.Gt: operators.gt,
    ast.GtE: operators.ge,
    ast.Eq: operators.eq,
    ast.NotEq: operators.ne,
}
_GRADIENT = re.compile(r"\.grad\b(?!\()")
_STEPPED = re.compile(rf"{_GRADIENT.pattern}|\.data\b|\bclip_grad|\bparam_groups\b")
_ARE_MEANS = ("_loss", "cross_entropy", "cross_entropy_with_logits")
_COUNTED_BY = ("torchmetrics", "ignite")
"""Packages whose metrics are objects that count what they are called with, in a raw loop each rank for itself."""


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a value that is computed of a part.

    Args:
        power: The value is that of one process times this power of the number of ranks; None if that is not known.
        is_part: The value comes from this rank's samples alone, so it also differs because the samples differ.
        is_batch: The value has, or may have, an entry for each sample.
        is_shape: The value is the shape of a tensor with an entry for each sample.
        is_sure: The value was followed through all of its computation.
        is_rows: The value is the number of samples.
        has_factor: The value was multiplied by a count or a sum of the part.
        items: What is known of each of several values.
    """

    power: int | None = 0
    is_part: bool = True
    is_batch: bool = False
    is_shape: bool = False
    is_sure: bool = True
    is_rows: bool = False
    has_factor: bool = False
    items: tuple[Known | None, ...] = ()

    @property
    def is_other(self) -> bool:
        """True if it is not what one process computes."""
        return self.is_part or self.power != 0


WHOLE = Known(is_part=False)
_BATCH = Known(is_batch=True)
_SIZE = Known(-1)
_ROWS = Known(-1, is_rows=True)
_MEAN = Known()
_UNKNOWN = Known(None, is_batch=True, is_sure=False)


@dataclass(frozen=True, slots=True)
class ReadNumber:
    """A number that somebody reads.

    Args:
        text: The expression in the program.
        power: See `Known`.
    """

    text: str
    power: int | None


class PartNumbers:
    """The numbers of one program that are of parts. It is read again for each loop whose batches begin to be split."""

    def __init__(self) -> None:
        self._loops: set[tuple[str, int]] = set()

    def lines(self, ranks: int, is_own: bool) -> list[str]:
        """Return what to say of them in a run of `ranks`; called where the program takes a batch that is split.

        Args:
            is_own: Whether it is a whole one, of this rank alone.
        """
        frames = list(users_frames(_MOST_FRAMES))
        if not frames:
            return []
        taking = frames[0]
        if not is_users(taking.f_code.co_filename):
            library = str(taking.f_globals.get("__name__", "")).partition(".")[0]
            return [f"what {library} counts of a training batch, beside the loss, is of a rank's part"]
        self._loops.add((taking.f_code.co_filename, taking.f_lineno))
        program = self._read(frames, ())
        found = [] if program is None else program.readings()
        if is_own:
            return [f"of a rank's own batches: {_named(found)}"] if found else []
        return lines_of(found, ranks)

    def decision(self, ranks: int, batch_size: int | None) -> str:
        """Return the count of a part by which the program would decide, or scale, with its line; "" where it does not.

        Called where the program is about to take the first batch that is split.
        """
        frames = list(users_frames(_MOST_FRAMES))
        if not frames or not is_users(frames[0].f_code.co_filename):
            return ""
        self._loops.add((frames[0].f_code.co_filename, frames[0].f_lineno))
        sizes = () if not batch_size else (batch_size, -(-batch_size // ranks), max(1, batch_size // ranks))
        program = self._read(frames, sizes)
        return "" if program is None else program.decision

    def _read(self, frames: Sequence[FrameType], sizes: Sequence[int]) -> _Program | None:
        own = [frame for frame in frames if linecache.getline(frame.f_code.co_filename, frame.f_lineno)]
        with suppress(Exception):  # of a program that reads in some way that nobody has thought of
            program = _Program(self._loops, {frame.f_code: variables_of(frame) for frame in frames}, sizes)
            program.run(_outermost(own))
            return program
        return None


def _outermost(frames: Sequence[FrameType]) -> FrameType:
    """Return the frame of the cell, or of the outermost function that is no library's."""
    cells = [frame for frame in frames if frame.f_code.co_name == "<module>"]
    own = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    return next((cell for cell in cells if cell in own), own[-1])


def without_magics(file: str) -> str:
    """Return the source of a cell, with ``pass`` in place of lines that are IPython's."""
    return "".join(_MAGIC.sub(r"\1pass", line) for line in linecache.getlines(file))


class _Program:
    """The source that is read: each function with what its arguments are.

    Args:
        loops: Files and lines that take batches of which this rank has a part.
        variables: Variables of the functions that run.
        sizes: Numbers of samples of a batch, and of its parts.

    Attributes:
        decision: What the program does by a count of a part, with its line.
    """

    def __init__(
        self, loops: set[tuple[str, int]], variables: Mapping[CodeType, dict[str, Any]], sizes: Sequence[int] = ()
    ) -> None:
        self.loops = loops
        self.variables = variables
        self.sizes = sizes
        self.decision = ""
        self.found: dict[str, ReadNumber] = {}
        self.kept: dict[str, Known] = {}  # what functions, and the cell, have counted or listed, and left behind
        self.depth = 0
        self._trees: dict[str, ast.Module] = {}
        self._attributes: dict[int, dict[str, Known]] = {}  # by object, as ``self.name``

    def attribute(self, of: Any, name: str) -> Known | None:
        """Return what methods that were read have left in an attribute, or what a property makes of it."""
        made = getattr(type(of), name, None)
        if isinstance(made, property) and id(of) in self._attributes:
            return None if made.fget is None else self.call(MethodType(made.fget, of), (), ())
        return self._attributes.get(id(of), {}).get(f"self.{name}")

    def run(self, frame: FrameType) -> None:
        body, _ = self.source_of(frame.f_code)
        scope = _Scope(self, frame.f_code.co_filename, {**frame.f_globals, **variables_of(frame)})
        for statement in body:
            scope.execute(statement)
        if frame.f_code.co_name == "<module>":
            self.kept |= scope.kept()
        for name, value in self.kept.items():
            if name not in scope.used:
                self.read(ast.parse(name, mode="eval").body, value)

    def call(self, function: Any, given: Sequence[Known | None], objects: Sequence[Any]) -> Known | None:
        """Return what a function of the notebook makes of its arguments."""
        code = function.__code__
        body, names = self.source_of(code)
        if not body or self.depth > _DEEPEST:
            raise LookupError
        names = names[1:] if isinstance(function, MethodType) else names
        variables = {**function.__globals__, **dict(zip(names, objects, strict=False))}
        if isinstance(function, MethodType):
            variables["self"] = function.__self__
        scope = _Scope(self, code.co_filename, {**variables, **self.variables.get(code, {})})
        scope.values = {name: value for name, value in zip(names, given, strict=False) if value is not None}
        if isinstance(function, MethodType):
            scope.values |= self._attributes.get(id(function.__self__), {})
        self.depth += 1
        for statement in body:
            scope.execute(statement)
        self.depth -= 1
        self.kept |= scope.kept({*code.co_varnames, *code.co_cellvars})
        if isinstance(function, MethodType):
            own = {name: value for name, value in scope.values.items() if name.startswith("self.")}
            self._attributes[id(function.__self__)] = own
        return scope.returned

    def source_of(self, code: CodeType) -> tuple[list[ast.stmt], list[str]]:
        """Return the statements of a function or a cell, and the names of its arguments."""
        file = code.co_filename
        if file not in self._trees:
            self._trees[file] = ast.parse(without_magics(file))
        tree = self._trees[file]
        if code.co_name == "<module>":
            return tree.body, []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node.body, [each.arg for each in node.args.args]
        return [], []

    def read(self, node: ast.expr, value: Known | None) -> None:
        """Note a number that somebody reads."""
        text = ast.unparse(node)
        if value is not None and value.is_other and not value.is_shape and text not in self.found:
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
            self.found[text] = ReadNumber(text, value.power)

    def readings(self) -> list[ReadNumber]:
        return list(self.found.values())


class _Scope:
    """Names of one function, or of the cell, while its statements are read in their order."""

    def __init__(self, program: _Program, file: str, objects: dict[str, Any]) -> None:
        self._program = program
        self._file = file
        self._objects = objects
        self.values: dict[str, Known] = {}  # by source: names, and attributes of names
        self.returned: Known | None = None
        self._made_of: dict[str, set[str]] = {}
        self._counted: dict[str, None] = {}  # names that only grow, in their order
        self._listed: set[str] = set()  # those of them that are lists or tables
        self._made_of_batch: set[str] = set()  # names that a loop over batches binds anew for each
        self._inside: list[ast.For | ast.AsyncFor | ast.While] = []
        self.used: set[str] = set()
        self._branches = 0

    # -- statements

    def execute(self, node: ast.stmt) -> None:
        self._scale(node)
        if isinstance(node, ast.For | ast.AsyncFor):
            self._bind_batch(node.target, node.iter)
            if self._is_split(node.iter):
                self._made_of_batch |= _bound_in(node)
            self._rounds(node)
            self._all(node.orelse)
        elif isinstance(node, ast.While):
            self._rounds(node)
            self._decide(node.test)
        elif isinstance(node, ast.Assign):
            self._decide_within(node.value)
            value = self._batch_of(node) or self.value(node.value)
            for target in node.targets:
                self._bind(target, value, node.value)
                self._fill(target)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind(node.target, self.value(node.value), node.value)
        elif isinstance(node, ast.AugAssign):
            self._add_to(ast.unparse(node.target), node.op, self.value(node.value), node.value)
            self._fill(node.target)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned = self.value(node.value) or self.returned
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child)
            if isinstance(node, ast.If):
                self._decide(node.test)
                if not all(map(_trains_nothing, (*node.body, *node.orelse))):
                    self._decide_by_part(node.test)
            self._branches += isinstance(node, ast.If | ast.Try)
            for name in ("body", "handlers", "orelse", "finalbody"):
                self._all(getattr(node, name, []))
            self._branches -= isinstance(node, ast.If | ast.Try)

    def _all(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            if isinstance(node, ast.ExceptHandler):
                self._all(node.body)
            else:
                self.execute(node)

    def _rounds(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        self._inside.append(node)
        for _ in range(2):
            self._all(node.body)
        self._inside.pop()

    def _decide(self, test: ast.expr) -> None:
        """Note numbers by which the loop goes on or ends: what was counted, compared with what no batch has made."""
        for node in ast.walk(test):
            if not isinstance(node, ast.Compare):
                continue
            sides = [(each, self.value(each)) for each in (node.left, *node.comparators)]
            known = [(each, value) for each, value in sides if value is not None and value.power]
            for each, value in known if len(known) < len(sides) else []:
                if any(ast.unparse(part) in self._counted for part in ast.walk(each) if isinstance(part, ast.expr)):
                    self._shown(each, value)

    def _decide_within(self, node: ast.expr) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.IfExp):
                self._decide_by_part(each.test)

    def _decide_by_part(self, test: ast.expr) -> None:
        """Note a number of the present batch by which the program decides what it trains, and parts of it otherwise."""
        if not (self._inside or self._program.depth) or self._program.decision:
            return
        for node in ast.walk(test):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            for at, operator in enumerate(node.ops):
                pair = sides[at], sides[at + 1]
                scaled = [each for each in pair if self._is_scaled(each)]
                if len(scaled) == 1 and self._may_differ(scaled[0], operator, pair):
                    return self._note_decision("decides", node)

    def _note_decision(self, does: str, node: ast.expr | ast.stmt) -> None:
        line = f"line {node.lineno}: {ast.unparse(node)}"
        line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
        self._program.decision = self._program.decision or f"the loop {does} by a count or a sum of the batch ({line})"

    def _scale(self, node: ast.stmt) -> None:
        """Note a statement that scales gradients, a step by hand or a learning rate by a number of one batch."""
        if isinstance(node, ast.Assign):
            changed, by = node.targets, node.value
        elif isinstance(node, ast.AugAssign):
            changed, by = [node.target], node.value
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name_of(node.value).endswith("_"):
            changed, by = [node.value.func], node.value
        else:
            return
        parts = (each for each in ast.walk(by) if isinstance(each, ast.expr))
        is_step = any(_STEPPED.search(ast.unparse(each)) for each in changed) or _GRADIENT.search(ast.unparse(by))
        if is_step and any(map(self._is_scaled, parts)):
            self._note_decision("scales its gradients or its steps", node)

    def _is_scaled(self, node: ast.expr) -> bool:
        """Return whether a number of one batch, which is not counted over several, differs by a factor in its parts."""
        value = self.value(node)
        is_known = value is not None and value.is_part and value.is_sure and not (value.is_batch or value.is_shape)
        counted = any(ast.unparse(each) in self._counted for each in ast.walk(node) if isinstance(each, ast.expr))
        return is_known and value is not None and bool(value.power) and not counted

    def _may_differ(self, scaled: ast.expr, operator: ast.cmpop, pair: tuple[ast.expr, ast.expr]) -> bool:
        """Return whether a comparison may be true for all parts of a batch, and false for the batch, or the reverse."""
        is_first = pair[0] is scaled
        limit = pair[1 if is_first else 0]
        number = limit.value if isinstance(limit, ast.Constant) else self._object(limit)
        if not isinstance(number, int | float):
            return True
        if (value := self.value(scaled)) is not None and value.is_rows and self._program.sizes:
            compare = _COMPARISONS.get(type(operator), operators.is_)
            outcomes = [compare(size, number) if is_first else compare(number, size) for size in self._program.sizes]
            return len(set(outcomes)) > 1
        is_of_one = number == 1 and isinstance(operator, (ast.Lt, ast.GtE) if is_first else (ast.Gt, ast.LtE))
        return not (number == 0 or is_of_one)

    def kept(self, own: Set[str] = frozenset()) -> dict[str, Known]:
        """Return what was counted or listed, and not used.

        Args:
            own: Variables that nobody sees after the function. An attribute is a result if it is a list or a table:
                a number in it is most often read by a method.
        """
        left = (name for name in self._counted if name not in self.used and name in self.values)
        return {name: self.values[name] for name in left if not own or self._outlives(name, own)}

    def _outlives(self, name: str, own: Set[str]) -> bool:
        root, _, attribute = name.partition(".")
        return name in self._listed and root == "self" if attribute else name not in own

    def _fill(self, target: ast.expr) -> None:
        """Note a table of the program in which entries are set, or counted, by what a batch says."""
        if not isinstance(target, ast.Subscript) or self.value(target.slice) is None:
            return
        table = ast.unparse(target.value)
        if table not in self._made_of_batch:
            self.values[table] = Known(None)
            self._counted[table] = None
            self._listed.add(table)

    def _is_split(self, node: ast.AST) -> bool:
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)  # type: ignore[attr-defined]
        return any((self._file, line) in self._program.loops for line in lines)

    def _bind_batch(self, target: ast.expr, iterated: ast.expr) -> None:
        value = self.value(iterated)
        if not self._is_split(iterated):
            return self._bind(target, value and replace(value, is_shape=False), iterated)
        calls = [ast.unparse(node.func) for node in ast.walk(iterated) if isinstance(node, ast.Call)]
        if "enumerate" in calls and isinstance(target, ast.Tuple) and len(target.elts) > 1:
            target = target.elts[1]
        self._bind(target, _BATCH, iterated)

    def _batch_of(self, node: ast.Assign) -> Known | None:
        """Return a batch, for ``x, y = next(batches)`` of a loader whose batches are split."""
        takes = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "next"
        if not takes or not self._is_split(node):
            return None
        for loop in self._inside[-1:]:
            self._made_of_batch |= _bound_in(loop)
        return _BATCH

    def _bind(self, target: ast.expr, value: Known | None, source: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            many = source.elts if isinstance(source, ast.Tuple) and len(source.elts) == len(target.elts) else []
            for at, each in enumerate(target.elts):
                if many:
                    self._bind(each, self.value(many[at]), many[at])
                elif value is not None and len(value.items) == len(target.elts):
                    self._bind(each, value.items[at], source)
                elif value is not None and value.is_shape:
                    self._bind(each, None if at else _ROWS, source)
                else:
                    self._bind(each, value, source)
            return
        if isinstance(target, ast.Starred):
            return self._bind(target.value, value, source)
        text = ast.unparse(target)
        self._made_of[text] = {each.id for each in ast.walk(source) if isinstance(each, ast.Name)}
        if value is None:
            if not self._branches:  # otherwise another branch may have bound it
                self.values.pop(text, None)
        else:
            self.values[text] = value

    def _add_to(self, text: str, operator: ast.operator, value: Known | None, source: ast.expr) -> None:
        old = self.values.get(text)
        if value is None:
            return
        if isinstance(operator, ast.Add | ast.Sub):
            self._counted[text] = None
            self.values[text] = value if old is None else _sum(old, value)
        else:
            self.values[text] = _product(old or WHOLE, value, -1 if isinstance(operator, ast.Div) else 1)

    # -- expressions

    def value(self, node: ast.expr) -> Known | None:
        """Return what is known of an expression; None if it has nothing to do with parts."""
        text = ast.unparse(node)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and text in self.values:
            if isinstance(node, ast.Name):
                self.used.add(text)
            return self.values[text]
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Attribute):
            below = self.value(node.value)
            if below is None:
                return self._program.attribute(self._object(node.value), node.attr)
            if not below.is_batch:
                return below
            return replace(below, is_shape=True) if node.attr == "shape" else _MEAN if node.attr == "loss" else below
        if isinstance(node, ast.Subscript):
            below = self.value(node.value)
            if below is not None and below.is_shape:
                return _ROWS if ast.unparse(node.slice) == "0" else None
            return below
        if isinstance(node, ast.BinOp):
            one, other = self.value(node.left), self.value(node.right)
            if one is None and other is None:
                return None
            if isinstance(node.op, ast.Add | ast.Sub):
                return other if one is None else one if other is None else _sum(one, other)
            if isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
                return _product(one or WHOLE, other or WHOLE, 1 if isinstance(node.op, ast.Mult) else -1)
            return reduce(_sum, filter(None, (one, other)))
        if isinstance(node, ast.FormattedValue):
            found = self.value(node.value)
            self._shown(node.value, found)
            return None
        if isinstance(node, ast.Lambda | ast.Constant):
            return None
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            for each in node.generators:
                self._bind_batch(each.target, each.iter)
            return self.value(node.elt)
        inside = [self.value(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        known = [each for each in inside if each is not None]
        found = reduce(_sum, known) if known else None
        return replace(found, items=tuple(inside)) if found is not None and isinstance(node, ast.Tuple) else found

    def _of_call(self, node: ast.Call) -> Known | None:
        values = [self.value(each) for each in (*node.args, *(word.value for word in node.keywords))]
        known = [each for each in values if each is not None]
        name = _name_of(node)
        if name in ("append", "extend") and isinstance(node.func, ast.Attribute):
            if known:
                kept = ast.unparse(node.func.value)
                self.values[kept] = reduce(_sum, known)
                self._counted[kept] = None
                self._listed.add(kept)
            return None
        if (metric := self._metric(node)) is not None:
            return self._of_metric(metric, name, any(each.is_other for each in known))
        below = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if name == "backward":
            self._note_backward(node)
            return None
        if name in _SHOWN_BY and (below is None or name == "format"):
            for each in (*node.args, *(word.value for word in node.keywords)):
                for shown in each.values if isinstance(each, ast.Dict) else [each]:
                    self._shown(shown, self.value(shown))
            return None
        if name == "len" and known:
            return _ROWS if known[0].is_batch else None
        of = below or (known[0] if known else None)
        if of is None:
            return None if self._function(node) is None else self._of_function(node, values)
        arguments = node.args if below is not None else node.args[1:]
        if of.is_batch and name == "size" and below is not None:
            first = [ast.unparse(each) for each in (*node.args, *(word.value for word in node.keywords))]
            return replace(of, is_shape=True) if not first else _ROWS if first[0] == "0" else None
        if of.is_batch and of.is_sure and name in (_SUMS | _MEANS) and not _is_along(arguments, node.keywords):
            return _SIZE if name in _SUMS else _MEAN
        if below is not None and (below.is_batch or name in _KEEPS):
            return replace(below, is_batch=False) if name == "item" else below
        if not of.is_batch and name in _KEEPS and below is None:
            return of
        return self._of_function(node, values)

    def _metric(self, node: ast.Call) -> str | None:
        """Return the name of a library's metric that is called, or of which a method is; None if it is no such call."""
        for each in (node.func, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])):
            if str(getattr(type(self._object(each)), "__module__", "")).partition(".")[0] in _COUNTED_BY:
                return ast.unparse(each)
        return None

    def _of_metric(self, metric: str, method: str, is_of_batch: bool) -> Known | None:
        if method == "reset":
            self.values.pop(metric, None)
        elif is_of_batch:
            self.values[metric] = Known(None)
        return self.values.get(metric)

    def _function(self, node: ast.Call) -> Any:
        """Return the function of the notebook that is called; None if it is no such one."""
        called = self._object(node.func)
        is_function = isinstance(called, FunctionType | MethodType)
        return called if is_function and is_users(called.__code__.co_filename) else None

    def _of_function(self, node: ast.Call, values: Sequence[Known | None]) -> Known | None:
        """Return what a function makes of its arguments, some of which are of parts."""
        called = self._object(node.func)
        known = [each for each in values if each is not None]
        if (function := self._function(node)) is not None:
            with suppress(LookupError, SyntaxError, OSError):
                return self._program.call(function, values[: len(node.args)], [self._object(a) for a in node.args])
        if not known:
            return None
        words = {word.arg: ast.unparse(word.value).strip("'\"") for word in node.keywords}
        reduction = words.get("reduction") or getattr(called, "reduction", None)
        if reduction is None and ast.unparse(node.func).endswith(
            ("_loss", "cross_entropy", "cross_entropy_with_logits")
        ):
            reduction = "mean"
        is_batch = any(each.is_batch for each in known)
        if is_batch and reduction in ("sum", "mean", "batchmean"):
            return _SIZE if reduction == "sum" else _MEAN
        if is_batch and (reduction == "none" or isinstance(called, torch.nn.Module) or _is_torchs(called)):
            return _BATCH if all(each.is_sure for each in known) else _UNKNOWN
        if isinstance(node.func, ast.Attribute) and not is_batch:
            receiver = ast.unparse(node.func.value)
            if receiver.isidentifier() and not _is_module(self._object(node.func.value)):
                self.values[receiver] = Known(None, is_part=any(each.is_part for each in known))
        if not is_batch and all(each.power == 0 for each in known):
            return reduce(_sum, known)
        return _UNKNOWN if any(each.is_part for each in known) else None

    def _object(self, node: ast.expr) -> Any:
        """Return the object that a name, or an attribute of one, stands for; None if it is not known."""
        if isinstance(node, ast.Name):
            return self._objects.get(node.id)
        if isinstance(node, ast.Attribute):
            of = self._object(node.value)
            if of is None or (isinstance(getattr(type(of), node.attr, None), property)):
                return None
            with suppress(Exception):
                return getattr(of, node.attr, None)
        return None

    def _note_backward(self, node: ast.Call) -> None:
        """Note that a loss, and what it was added up of, have the whole batch's value from here on."""
        called = (node.func.value, *node.args)  # type: ignore[attr-defined]
        roots = [each for root in called for each in _parts_of(root)]
        if any(value.has_factor for each in (*called, *roots) if (value := self.value(each)) is not None):
            self._note_decision("multiplies its loss", node)
        waiting, seen = {ast.unparse(root) for root in roots}, set[str]()
        for text in waiting & self.values.keys():
            self.values[text] = WHOLE
        while waiting:
            text = waiting.pop()
            seen.add(text)
            value = self.values.get(text)
            if value is not None and not (value.is_batch and value.is_sure):
                self.values[text] = WHOLE
                waiting |= self._made_of.get(text, set()) - seen

    def _shown(self, node: ast.expr, value: Known | None) -> None:
        """Note a number that is printed or kept; not a batch."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            for each in node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]:
                self._shown(each, self.value(each))
        elif value is not None and not (value.is_batch and value.is_sure):
            self._program.read(node, value)


def _trains_nothing(node: ast.stmt) -> bool:
    """Return whether a statement prints, logs or keeps something, or ends in an error, and does nothing else."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return isinstance(node, ast.Pass | ast.Raise)
    function = node.value.func
    name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    return name in _SHOWN_BY or name in ("append", "extend")


def _bound_in(loop: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(loop) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _parts_of(root: ast.expr) -> Iterator[ast.expr]:
    """Yield the names below a loss that is scaled or added up where its backward begins."""
    if isinstance(root, ast.Name | ast.Attribute | ast.Subscript):
        yield root
    elif isinstance(root, ast.BinOp):
        yield from (*_parts_of(root.left), *_parts_of(root.right))
    elif isinstance(root, ast.Call):
        yield from (each for argument in root.args for each in _parts_of(argument))


def _name_of(node: ast.Call) -> str:
    """Return the name of a function or method that is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)


def _is_along(arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> bool:
    """Return whether a reduction leaves the dimension of the samples."""
    dims = [ast.unparse(each) for each in arguments[:1]]
    dims += [ast.unparse(word.value) for word in keywords if word.arg in ("dim", "axis")]
    return any(dim not in ("0", "None") for dim in dims)


def _is_torchs(called: Any) -> bool:
    return str(getattr(called, "__module__", "") or "").partition(".")[0] in ("torch", "numpy", "builtins", "")


def _is_module(value: Any) -> bool:
    return isinstance(value, type(torch))


def _sum(one: Known, other: Known) -> Known:
    is_alike = one.power == other.power
    return Known(
        one.power if is_alike else None,
        one.is_part or other.is_part,
        one.is_batch or other.is_batch,
        is_sure=one.is_sure and other.is_sure,
        has_factor=one.has_factor or other.has_factor,
    )


def _product(one: Known, other: Known, sign: int) -> Known:
    is_batch = one.is_batch or other.is_batch
    power = None if one.power is None or other.power is None else one.power + sign * other.power
    is_sure = one.is_sure and other.is_sure
    has_factor = one.has_factor or other.has_factor
    if is_sure and power and not is_batch and one.is_other and other.is_other:  # a mean times len(x) is a sum
        has_factor = has_factor or power != -1 or (sign > 0 and not (one.is_rows or other.is_rows))
    return Known(power, one.is_part or other.is_part, is_batch, is_sure=is_sure, has_factor=has_factor)


def lines_of(readings: Sequence[ReadNumber], ranks: int) -> list[str]:
    """Return a sentence for each factor by which numbers differ from those of one process, and one for all others.

    Example:
        >>> lines_of([ReadNumber("correct / len(dataset)", -1)], 2)[0].partition(". ")[0]
        "about 1/2 of the value in one process, as it counts a rank's part of each batch: correct / len(dataset)"
        >>> lines_of([ReadNumber("correct / seen", 0)], 2)
        ["of a rank's part of each batch: correct / seen"]
    """
    found = []
    for power in sorted({each.power or 0 for each in readings}):
        named = _named([each for each in readings if (each.power or 0) == power])
        if power < 0:
            found.append(
                f"about 1/{ranks**-power} of the value in one process, as it counts a rank's part of each batch: "
                f"{named}. Divide counts by counts of the same loop, not by the length of a data set"
            )
        elif power > 0:
            found.append(
                f"about {ranks**power} times the value in one process, as the loss is the whole batch's, and the "
                f"length of a batch that of a rank's part: {named}. Divide by the loader's batch_size"
            )
        else:
            found.append(f"of a rank's part of each batch: {named}")
    return found


def _named(readings: Sequence[ReadNumber]) -> str:
    more = f" and {len(readings) - _MOST_NAMED} more" if len(readings) > _MOST_NAMED else ""
    return f"{', '.join(each.text for each in readings[:_MOST_NAMED])}{more}"
