"""Record what a function or cell depends on: its code, and what it names. Used in kernel and ranks; runs no code.

A `SourceMark` follows the names that the code reads: functions and classes of its own file or of the notebook, their
methods, defaults and closures, and so on. Code counts by its text (`code_text`). Constants count by their values. Data,
models, and the code of other files and packages do not count.

A map, which asks "may these answers go on?", leaves out more than a sweep, which asks "must this run be done again?":
long containers, names that the code itself changes, and values that say where something runs or lies, since a changed
value refuses to go on there, and only repeats some work here (`is_strict`). Passwords and the like are not written.
"""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import hashlib
import inspect
import json
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import islice
from typing import Any, Self

from nbaccel.base.notices import is_users
from nbaccel.base.quantities import plural
from nbaccel.base.values import frozen
from nbaccel.features.source.code_text import (
    CODE,
    COMPILED,
    CodeTexts,
    mark_of_code,
    mark_of_text,
    mark_of_tree,
    parsed,
)
from nbaccel.features.source.plain_values import (
    LONG,
    VALUE,
    is_a,
    is_place,
    is_plain,
    is_secret,
    mark_of_value,
    parts_of,
    short_hash,
)
from nbaccel.namespace.names import names_read

__all__ = ["SourceMark"]

_MAIN = "__main__"
_WHOLE = ""
"""The name of the function, or the cell, itself."""

_OTHERS = "others"
_MOST_NAMES = 200
_MOST_FOLLOWED = 2000
"""Names after which no more are followed: a program has fewer, and a structure of objects may have more."""

_MOST_IN_WORDS = 3
_MOST_LOOKED_AT = 100
"""Values in a container among which functions are looked for."""

_CLASS, _NAMED = "class ", "name "
_UNCOUNTED = "uncounted "
_DATA, _OBJECT = _UNCOUNTED + "data", _UNCOUNTED + "an object"
"""Marks of values that code reads and that do not count: all are equal, and differ from those of what counts."""

_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})
_CHANGE_IT = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
     "setdefault", "update"}
)  # fmt: skip
"""Methods of containers that change them."""

_CALLED_BY_NAME = (
    types.FunctionType, types.BuiltinFunctionType, type, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip
_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTION_NODES, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Parts of a function that bind names of their own."""

_IS_AROUND = "__wrapped__"
_MOST_AROUND = 20
_MADE = ("<string>", "<attrs")
"""Beginnings of the files of methods that packages write for a class."""


@frozen
class SourceMark:
    """The marks of all that a function or a cell computes by.

    Args:
        names: A short text for each name; the function itself has the name "". Readable values stand there as they are.
        uncounted: Arguments of a partial, or attributes of a callable object, whose values do not count.
    """

    names: dict[str, str]
    uncounted: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Any, is_strict: bool = False) -> Self:
        """Return the mark of a function, a class, a partial, a method, or another object that can be called.

        Args:
            is_strict: Containers of any length, and values that the code changes, count too.

        Example:
            >>> SourceMark.of(len).names
            {'': 'name builtins.len'}
        """
        if function is None:
            return cls({})
        reading = _Reading(is_strict)
        reading.read(function)
        return cls(*reading.finished())

    @classmethod
    def of_cell(cls, text: str, codes: Sequence[types.CodeType], names: Mapping[str, Any]) -> Self:
        """Return the mark of a cell, in which everything plain counts.

        Args:
            text: Its Python.
            codes: What it compiles to.
            names: Its globals, without those that it binds itself.
        """
        reading = _Reading(is_strict=True)
        reading.read_cell(text, codes, names)
        return cls(*reading.finished())

    @property
    def digest(self) -> str:
        """One text that is equal for equal marks."""
        return hashlib.blake2b(json.dumps(sorted(self.names.items())).encode(), digest_size=16).hexdigest()

    def is_another(self, earlier: Mapping[str, str] | str) -> bool:
        """Return whether the function itself is another one than that of an earlier mark; see `difference`."""
        if not isinstance(earlier, str):
            return earlier.get(_WHOLE) != self.names.get(_WHOLE)
        then, now = mark_of_text(earlier), self.names.get(_WHOLE, "")
        return bool(earlier) != bool(now) or (bool(then) and now.startswith(CODE) and then != now)

    def difference(self, earlier: Mapping[str, str] | str) -> str:
        """Return in words what differs from an earlier mark; empty if nothing does.

        A name that only one of them has makes no difference: the code that reads it would differ too, or it is a place
        or a password. Data and other objects cannot be compared, but a number that has become data has changed.

        Args:
            earlier: Its names; or a text alone, as the first version wrote it.
        """
        if self.is_another(earlier):
            marks = (self.names.get(_WHOLE, ""), "" if isinstance(earlier, str) else earlier.get(_WHOLE, ""))
            has_no_text = any(mark.startswith(COMPILED) for mark in marks)
            return "its code has changed, or it has no text and Python has" if has_no_text else "its source has changed"
        if isinstance(earlier, str):
            return ""
        both = {name: (then, self.names[name]) for name, then in earlier.items() if name in self.names}
        changed = [_changed(name, *marks) for name, marks in both.items() if not _are_alike(*marks)]
        if len(changed) > _MOST_IN_WORDS:
            changed[_MOST_IN_WORDS:] = [f"{plural(len(changed) - _MOST_IN_WORDS, 'more name')} differ"]
        return "; ".join(changed)


def _are_alike(then: str, now: str) -> bool:
    """Return whether nothing differs as far as is known: a model may not have been loaded when its name was None.

    Example:
        >>> _are_alike("= None", "uncounted an object"), _are_alike("= None", "uncounted data")
        (True, False)
    """
    has_come_or_gone = {then, now} == {VALUE + "None", _OBJECT}
    return then == now or has_come_or_gone or (then.startswith(_UNCOUNTED) and now.startswith(_UNCOUNTED))


def _changed(name: str, then: str, now: str) -> str:
    """Return one difference in words.

    Example:
        >>> _changed("MAX_TOKENS", "= 32", "= 64"), _changed("clean", "code 1", "code 2")
        ('MAX_TOKENS was 32 then, and is 64 now', 'clean() has changed')
    """
    if then.startswith(COMPILED) != now.startswith(COMPILED):
        return f"{name} has changed, or its text is not found and cannot be compared"
    if name == _OTHERS:
        return "another of the names that it reads has changed"
    if all(mark.startswith((VALUE, _UNCOUNTED)) for mark in (then, now)):
        then, now = (mark.removeprefix(VALUE).removeprefix(_UNCOUNTED) for mark in (then, now))
        return f"{name} was {then} then, and is {now} now"
    is_function = then.startswith((CODE, COMPILED)) and not name.endswith(")")
    return f"{name}() has changed" if is_function else f"{name} has changed"


class _Reading:
    """Follows the names of one function, breadth first and in a fixed order, so that equal sources have equal marks.

    Values are looked at last, when it is known which names the code itself changes: these do not count for a map.
    """

    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._texts = CodeTexts()
        self._homes = {_MAIN}
        self._marks: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._uncounted: list[str] = []
        self._objects: list[str] = []
        self._of_class: dict[str, str] = {}  # attributes that an object has of its class, with their names there
        self._todo: deque[tuple[str, Any]] = deque()
        self._seen: dict[str, Any] = {}  # holds the objects, so that none gets the id of another
        self._first: dict[int, str] = {}  # by the ids of functions, classes and objects: the name that came first
        self._changed: set[str] = set()

    def read(self, value: Any) -> None:
        """Follow a function or an object that is called."""
        self._add_argument(_WHOLE, value)
        self._follow()
        self._uncounted = [name for name, given in _given_to(value) if not self._counts(given)]

    def read_cell(self, text: str, codes: Sequence[types.CodeType], names: Mapping[str, Any]) -> None:
        """Follow a cell."""
        self._marks[_WHOLE] = mark_of_tree(parsed(text))
        self._add_globals(names_read(codes), names)
        self._follow()

    def finished(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the marks, those of many names as one, and the arguments that do not count."""
        values = {name: mark_of_value(name, value, self._is_strict) for name, value in self._values.items()}
        kept = [(name, mark) for name, mark in values.items() if mark and not self._changes(name)]
        marks = {_WHOLE: self._marks.pop(_WHOLE), **dict(kept[:_MOST_NAMES])}
        left = max(0, _MOST_NAMES - len(kept))
        marks |= dict(list(self._marks.items())[:left])
        if rest := sorted([*kept[_MOST_NAMES:], *list(self._marks.items())[left:]]):
            marks[_OTHERS] = LONG + short_hash(json.dumps(rest))
        if not self._is_strict:  # a digest tells by the missing name that a value counts no more
            marks |= dict(list(self._marks_of_uncounted(values))[: max(0, _MOST_NAMES - len(marks))])
        return marks, tuple(self._uncounted)

    def _marks_of_uncounted(self, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the marks of data and objects; places and passwords may be anything."""
        for name, mark in values.items():
            value = self._values[name]
            if not (mark or self._changes(name) or is_place(value) or is_secret(name, value)):
                yield name, _DATA
        yield from ((name, _OBJECT) for name in self._objects if not self._changes(name))

    def _changes(self, name: str) -> bool:
        return not self._changed.isdisjoint({name, self._of_class.get(name, name)})

    # -- names

    def _add(self, name: str, value: Any) -> str:
        """Note a value under a name, once; equal names of different values get numbers. Return the name."""
        value, base, number = self._unwrapped(value), name, 1
        while name in self._seen:
            if self._seen[name] is value:
                return name
            number += 1
            name = f"{base} ({number})"
        if len(self._seen) < _MOST_FOLLOWED:
            self._seen[name] = value
            self._todo.append((name, value))
        return name

    def _unwrapped(self, value: Any) -> Any:
        """Return what decorators of packages are around: the text of what they decorate names them."""
        for _ in range(_MOST_AROUND):
            if self._is_own(value) or _IS_AROUND not in (around := _dictionary_of(value)):
                break
            value = around[_IS_AROUND]
        return value

    def _add_argument(self, name: str, value: Any) -> None:
        """Note a function that was given, whose file counts as the notebook does, or another argument."""
        self._homes |= {_home_of(value), _home_of(_dictionary_of(value).get(_IS_AROUND, value))}
        self._add(name, value)

    def _add_globals(self, read: Iterable[str], space: Mapping[str, Any]) -> None:
        for one in sorted(read):
            if one in space:
                self._add(one, space[one])

    def _follow(self) -> None:
        while self._todo:
            self._take(*self._todo.popleft())

    def _take(self, name: str, value: Any) -> None:
        """Mark one value, and note what it is made of."""
        if is_plain(value):
            self._values[name] = value
            for path, part in islice(parts_of(value), _MOST_LOOKED_AT):
                if is_a(part, types.FunctionType, type) and self._is_own(part):
                    self._add(name + path, part)
        elif (first := self._first_name(name, value)) != name:
            self._marks[name] = _NAMED + first
        elif is_a(value, types.MethodType):
            self._code(name, self._unwrapped(value.__func__))
            self._add(f"its {type(value.__self__).__name__}", value.__self__)
        elif is_a(value, functools.partial):
            self._partial(name, value)
        elif is_a(value, *_CALLED_BY_NAME):
            self._code(name, value)
        elif not is_a(value, types.ModuleType):
            self._object(name, value)

    def _first_name(self, name: str, value: Any) -> str:
        """Return the name under which a value is read: that of its definition, or the one that came first."""
        if id(value) not in self._first:
            own = value.__qualname__ if is_a(value, types.FunctionType, type) and self._is_own(value) else "<locals>"
            is_taken = own in self._seen and self._seen[own] is not value
            own = name if name == _WHOLE or "<" in own or is_taken else own
            self._first[id(value)] = self._add(own, value)
        return self._first[id(value)]

    def _is_own(self, value: Any) -> bool:
        """Return whether a function or a class is of the notebook, or of the file of the function that was given."""
        return _home_of(value) in self._homes and _is_by_user(value)

    # -- code

    def _code(self, name: str, value: Any) -> None:
        """Mark a function or a class."""
        if not self._is_own(value) or not is_a(value, types.FunctionType, type):
            self._marks[name] = _NAMED + _full_name(value)
        elif is_a(value, type):
            self._class(name, value)
        else:
            self._function(name, value)

    def _function(self, name: str, function: types.FunctionType) -> None:
        code, space = function.__code__, function.__globals__
        tree = self._texts.tree_of(code, space)
        self._marks[name] = mark_of_code(code) if tree is None else mark_of_tree(tree)
        said, read = _said(name, function), names_read([code])
        free = {one: f"{one} in {said}" for one in code.co_freevars}
        for path in () if tree is None or self._is_strict else changed_in(tree):
            root, _, attribute = path.partition(".")
            owner = root if root in read else free.get(root, "")
            self._changed.add(f"{owner}.{attribute}" if attribute else owner)
        self._add_globals(read, space)
        for one, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                self._add(free[one], cell.cell_contents)
        for parameter, default in _defaults_of(function, tree):
            self._add(f"{parameter} of {said}", default)

    def _partial(self, name: str, value: functools.partial[Any]) -> None:
        self._marks[name] = _NAMED + f"partial of {plural(len(value.args), 'argument')}"
        of = _said(name) if name else "the partial"
        self._add_argument(f"the function of {of}", value.func)
        given = {f"argument {number}": each for number, each in enumerate(value.args, 1)} | value.keywords
        for argument, each in given.items():
            self._add_argument(f"{argument} of {of}", each)

    def _class(self, name: str, kind: type) -> None:
        bases = [base for base in kind.__bases__ if base is not object]
        members = dict(_members_of(kind))
        annotated: list[str] = []
        with suppress(Exception):  # it may name what does not exist
            annotated = list(inspect.get_annotations(kind))
        document = str(kind.__doc__) if bases and not is_dataclass(kind) else ""  # see `canonical`
        methods = sorted(each for each, value in members.items() if is_a(value, types.FunctionType))
        facts = [[base.__name__ for base in bases], methods, annotated, document]
        self._marks[name] = _CLASS + short_hash(json.dumps(facts))
        for base in filter(self._is_own, bases):
            self._add(base.__name__, base)
        for member, value in members.items():
            self._add(f"{name or kind.__name__}.{member}", value)

    def _object(self, name: str, value: Any) -> None:
        """Take an object: its class if that is the user's, and its attributes if no other package may change them."""
        kind = type(value)
        mine = [each for each in kind.__mro__ if each is not object]
        if self._is_own(kind):
            self._add(kind.__name__, kind)
        if name == _WHOLE:
            self._marks[name] = _NAMED + (kind.__name__ if self._is_own(kind) else _full_name(kind))
        elif not is_place(value):
            self._objects.append(name)
        if all(map(self._is_own, mine)) or kind in (types.SimpleNamespace, argparse.Namespace):
            state = set() if self._is_strict else self._state_of(mine)
            for attribute, each in (self._defaults_of(name, mine) | _attributes_of(value)).items():
                if attribute not in state:
                    self._add(f"{name or f'its {kind.__name__}'}.{attribute}", each)

    def _defaults_of(self, name: str, classes: Sequence[type]) -> dict[str, Any]:
        """Return the plain attributes that an object has of its class, until it gets its own.

        Args:
            name: The name of the object.
        """
        found: dict[str, Any] = {}
        for kind in () if self._is_strict else classes[::-1]:  # a digest tells an attribute of its own anyway
            for attribute, each in _members_of(kind):
                if is_plain(each):
                    found[attribute] = each
                    self._of_class[f"{name or f'its {classes[0].__name__}'}.{attribute}"] = (
                        f"{kind.__name__}.{attribute}"
                    )
        return found

    def _state_of(self, classes: Iterable[type]) -> set[str]:
        """Return attributes that methods change after the object was made: its state, not its settings."""
        found: set[str] = set()
        for each in classes:
            for name, method in _members_of(each):
                if is_a(method, types.FunctionType) and name not in _CONSTRUCTORS:
                    code = method.__code__
                    tree = self._texts.tree_of(code, method.__globals__)
                    me = f"{next(iter(code.co_varnames), '')}."
                    changed = () if tree is None else changed_in(tree)
                    found |= {path.removeprefix(me) for path in changed if path.startswith(me)}
        return found

    def _counts(self, value: Any) -> bool:
        return is_a(value, *_CALLED_BY_NAME) or (is_plain(value) and bool(mark_of_value("", value, self._is_strict)))


# --- code and classes ---------------------------------------------------------------------------------------------


def changed_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names and attributes that a function changes behind itself: "seen", or "self.seen".

    Names that a function within it binds are others, though they may be called alike.

    Example:
        >>> list(changed_in(ast.parse("def f(x):\\n    global n\\n    seen[x] = 1\\n    self.all.append(x)")))
        ['n', 'seen', 'self.all']
    """
    no_names: frozenset[str] = frozenset()
    todo = deque([(tree, no_names)])
    while todo:
        node, bound = todo.popleft()
        yield from (path for path in _changed_by(node) if path.partition(".")[0] not in bound)
        for child in ast.iter_child_nodes(node):
            todo.append((child, _bound_in(child, bound) if isinstance(child, _FUNCTION_NODES) else bound))


def _changed_by(node: ast.AST) -> Iterable[str]:
    match node:
        case ast.Global() | ast.Nonlocal():
            return node.names
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return [_path_of(node)]
        case ast.Subscript(ctx=ast.Store() | ast.Del()):
            return [_path_of(node.value)]
        case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in _CHANGE_IT:
            return [_path_of(owner)]
    return ()


def _bound_in(function: ast.AST, around: frozenset[str]) -> frozenset[str]:
    """Return the names that an inner function binds as parameters or by assignments, and those bound around it."""
    own, of_others, of_all = set(), set(), set()
    todo = deque(ast.iter_child_nodes(function))
    while todo:
        node = todo.popleft()
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Nonlocal(names=names):
                of_others.update(names)
            case ast.Global(names=names):
                of_all.update(names)
        if not isinstance(node, _SCOPES):
            todo.extend(ast.iter_child_nodes(node))
    return around.union(own - of_others) - of_all


def _path_of(node: ast.expr) -> str:
    """Return the name or the first attribute that an expression reads; empty for others."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return f"{name}.{attribute}"
        case ast.Attribute() | ast.Subscript():
            return _path_of(node.value)
    return ""


def _defaults_of(function: types.FunctionType, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters with defaults, without those whose default is a literal in the text of the function."""
    literal: set[str] = set()
    if tree is not None:
        places = [*tree.args.posonlyargs, *tree.args.args]
        pairs = [*zip(places[::-1], tree.args.defaults[::-1], strict=False),
                 *zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True)]  # fmt: skip
        literal = {place.arg for place, default in pairs if isinstance(default, ast.Constant)}
    code = function.__code__
    defaults = function.__defaults__ or ()
    named = dict(zip(code.co_varnames[: code.co_argcount][::-1], defaults[::-1], strict=False))
    for parameter, default in {**named, **(function.__kwdefaults__ or {})}.items():
        if parameter not in literal:
            yield parameter, default


def _members_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class defines, as functions and values, without what Python and `dataclasses` add to it."""
    is_enum = issubclass(kind, enum.Enum)
    if is_enum:
        choices: Any = kind
        yield from ((name, each.value) for name, each in choices.__members__.items())
    for name, value in list(vars(kind).items()):
        is_dunder = name.startswith("__") and name.endswith("__")
        for part, each in _functions_in(name, value):
            inner = _dictionary_of(each).get(_IS_AROUND, each) if is_a(each, types.FunctionType) else each
            if is_a(inner, types.FunctionType):
                is_made = is_dunder and (inner.__code__.co_filename.startswith(_MADE) or not _is_by_user(inner))
            else:
                is_made = is_dunder or is_enum
            if not is_made:
                yield part, each


def _functions_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an attribute of a class, or the functions that it is made of."""
    if is_a(value, staticmethod, classmethod):
        yield name, value.__func__
    elif is_a(value, functools.cached_property, functools.partialmethod):
        yield name, value.func
    elif is_a(value, property):
        parts = {name: value.fget, f"{name}.setter": value.fset}
        yield from ((part, each) for part, each in parts.items() if each is not None)
    else:
        yield name, value


def _given_to(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function was given with it: the arguments of a partial, the attributes of its object."""
    while is_a(value, functools.partial):
        yield from ((f"argument {number}", each) for number, each in enumerate(value.args, 1))
        yield from value.keywords.items()
        value = value.func
    owner = value.__self__ if is_a(value, types.MethodType) else value
    if not is_a(owner, *_CALLED_BY_NAME):
        yield from _attributes_of(owner).items()


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its dictionary and in slots, without running code of its class."""
    found = dict(_dictionary_of(value))
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if type(member) is types.MemberDescriptorType and name != "__dict__":
                with suppress(AttributeError):
                    found[name] = member.__get__(value)
    return found


def _dictionary_of(value: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _home_of(value: Any) -> str:
    """Return the module of a function, also of one in a partial or a method, of a class, or of an object's class."""
    while is_a(value, functools.partial, types.MethodType):
        value = value.func if is_a(value, functools.partial) else value.__func__
    if is_a(value, types.FunctionType):
        return str(value.__globals__.get("__name__"))  # that of the function's wrapper, not of what it wraps
    return str((value if is_a(value, type) else type(value)).__module__)


def _is_by_user(value: Any) -> bool:
    if is_a(value, types.FunctionType):
        return is_users(value.__code__.co_filename)
    home = _home_of(value)
    return home == _MAIN or is_users(getattr(sys.modules.get(home), "__file__", None) or "<frozen")


def _full_name(value: Any) -> str:
    """Return "torch.relu": without the modules between, which versions of a package move."""
    package = str(getattr(value, "__module__", None) or "").partition(".")[0].strip("_")
    name = getattr(value, "__name__", type(value).__name__)
    return f"{package}.{name}" if package else str(name)


def _said(name: str, value: Any = None) -> str:
    """Return a function as a person calls it."""
    called = name or str(getattr(value, "__name__", type(value).__name__))
    return called.strip("<>") if "<" in called else f"{called}()"
