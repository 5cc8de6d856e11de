"""MarkedCell: a cell whose run can be saved between the rounds of its loops, and goes on there. Runs in ranks.

While it is entered, functions of the notebook have marked loops (`marked_loops`) and loaders note their draws. A loop
is open from its head to its end. Before each round a loop asks whether steps were taken since the last one: that is a
`Boundary`, at which nothing is half done. Its position is the statement of each of the user's frames, and of each open
loop how many items it has had, with the random states of its head and of its loaders' draws.

What the names hold is not seen to here: whoever watches is told of the head of the outermost loop and of boundaries,
and a run that goes on gets names and contents from `GoingOn`.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import itertools
import linecache
import os
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, Protocol, Self

from torch.optim.optimizer import register_optimizer_step_post_hook

from nbaccel.base.quantities import with_article
from nbaccel.errors import CannotResume
from nbaccel.features.cell_checkpoints import random_states
from nbaccel.features.cell_checkpoints.frame_position import NoPosition, Standing, locals_of, path_of, users_frames
from nbaccel.features.cell_checkpoints.loader_draws import (
    DRAWN,
    LoaderDraw,
    LoaderDraws,
    digest_of,
    further_parts,
    hands_out_by_number,
    has_generator,
    is_compared,
    is_iterator,
    is_known,
    obstacle_to_passing,
)
from nbaccel.features.cell_checkpoints.marked_loops import (
    CELL,
    LOOPS,
    READS_BY_TEXT,
    GoesOnAt,
    LoopSite,
    Path,
    UsersFunction,
    UsersProgram,
    ahead,
    blocks_of,
    bound_by,
    marked,
)
from nbaccel.features.source.code_text import parsed_lines
from nbaccel.features.source.users_functions import (
    FUTURE,
    Codes,
    codes_of,
    functions_by_file,
    functions_reached,
    is_rewritable,
    key_of,
    replace_codes,
    uses_name,
)
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.namespace.names import read_before_made
from nbaccel.train.step.raw_loop_hooks import batches_are_parts

__all__ = ["Boundary", "GoingOn", "MarkedCell", "Roots", "RunWatcher"]

Roots = dict[str, Any]
"""Values by name: a global by its own, a local of the user's frame 2 as "2:name". The cell is frame 0."""

_SHOWN_ITEMS = frozenset({int, str, float, bytes, bool})
"""Types of items by which a loop that goes on knows that it has come to the same one."""


class RunWatcher(Protocol):
    """An observer of a run that can be saved."""

    def at_head(self, roots: Roots) -> None:
        """Note the head of an outermost loop that may train. Called for later ones too until one has trained."""

    def at_boundary(self, boundary: Boundary) -> None:
        """Note that a loop is about to begin a round, and steps were taken since its last; the innermost loop first."""


class GoingOn(Protocol):
    """A saved run, for the one that goes on.

    Attributes:
        position: What `Boundary.position` returned.
        unsaved: Roots that no file could hold: their statements run again.
        made: Roots whose statements run again, and whose values are filled afterwards.
    """

    @property
    def position(self) -> Mapping[str, Any]: ...
    @property
    def unsaved(self) -> Collection[str]: ...
    @property
    def made(self) -> Collection[str]: ...

    def at_head(self, roots: Roots) -> Mapping[str, Any]:
        """Compare, write contents in place; return the roots to bind."""

    def fill(self, roots: Roots) -> Mapping[str, Any]:
        """Fill what the statements of a frame have made again; return further roots to bind."""

    def write_again(self, roots: Roots, is_last: bool) -> Mapping[str, Any]:
        """Write all contents once more, since what was evaluated on the way may have changed them.

        Args:
            is_last: The position is reached, and all that statements make again has to be there.

        Returns:
            As `fill`, which it does where that was not done.
        """

    def arrived(self) -> None:
        """Note that the loop goes on now."""


def _runs_plain() -> bool:
    """Return whether a function runs its plain body: `torch.compile` reads it, or no marked cell runs here.

    A process that is spawned, such as the worker of a loader, gets the function by its code.
    """
    from torch.compiler import is_compiling

    return is_compiling() or not hasattr(builtins, LOOPS)


class MarkedCell:
    """A cell with marked loops. A context manager: functions of the notebook have theirs while it is entered.

    Args:
        source: The cell.
        namespace: It runs in it.
        watcher: Is told of heads and boundaries.
        going_on: The saved run that it goes on with; None for one that begins.
        is_ours: Returns whether a file, or a cell, is of the notebook.

    Attributes:
        parts: The code that runs.
        program: The texts of the cell and of the notebook's functions.
        steps: Steps of optimizers so far.

    Raises:
        CannotResume: The source of the cell, or of a function on the way, is another one.
    """

    def __init__(
        self,
        source: CellSource,
        namespace: dict[str, Any],
        watcher: RunWatcher,
        going_on: GoingOn | None = None,
        is_ours: Callable[[str], bool] = is_rewritable,
    ) -> None:
        self._source = source
        self.namespace = namespace
        self._watcher = watcher
        self._is_ours = is_ours
        self._files = functions_by_file(is_ours, self._functions())
        self.program = UsersProgram({source.name: source.parsed()} | _trees(self._files, source.name))
        self.steps = 0
        self.draws = LoaderDraws(self._note_drawn)
        self.open_loops: list[_OpenLoop] = []
        self.ended: list[list[Path]] = []
        self.ended_at_no_position = ""
        self.head_locals: list[set[str]] | None = None
        self._place = (0, 0)
        self._way = None if going_on is None else _Way(self, going_on)
        self.parts = source.compile_tree(self._marked(source.name))
        self._exit = ExitStack()

    @property
    def cell(self) -> str:
        """The name of the cell, as of a file."""
        return self._source.name

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self._place = (os.getpid(), threading.get_ident())
            self._give_plain(itertools.chain(*self._files.values()))  # what an earlier cell's end has not reached
            setattr(builtins, LOOPS, self)
            exits.callback(self._leave)
            on_the_way = set() if self._way is None else {function.file for function, _ in self._way.entries}
            for name, functions in self._files.items():
                if name in self.program.trees and (self.program.is_marked(name) or name in on_the_way):
                    with suppress(SyntaxError, ValueError, RecursionError):  # a text that cannot be compiled as a whole
                        replace_codes(name, functions, self._marked(name), LOOPS)
            exits.callback(register_optimizer_step_post_hook(self._count_step).remove)
            exits.enter_context(self.draws)
            self._exit = exits.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def _marked(self, name: str) -> ast.Module:
        return marked(self.program, name, [] if self._way is None else self._way.entries, _runs_plain)

    def _leave(self) -> None:
        """Give functions their plain code, also those that the cell has made.

        One that is not reached runs its plain body from now on, see `_runs_plain`.
        """
        self._place = (0, 0)
        self.open_loops.clear()
        self._give_plain(itertools.chain(*self._files.values(), self._functions()))
        delattr(builtins, LOOPS)

    def _functions(self) -> list[types.FunctionType]:
        return functions_reached(self._source.compile(), self.namespace, self._is_ours)

    def _give_plain(self, functions: Iterable[types.FunctionType]) -> None:
        plain: dict[tuple[str, int], Codes] = {}
        for function in functions:
            code = function.__code__
            if code.co_filename in self.program.trees and uses_name(code, LOOPS):
                key = code.co_filename, code.co_flags & FUTURE
                if key not in plain:
                    plain[key] = self._plain_codes(*key)
                twin = plain[key].get(key_of(code))
                if twin is not None and twin.co_freevars == code.co_freevars:
                    function.__code__ = twin

    def _plain_codes(self, file: str, flags: int) -> Codes:
        is_cell = file != self.cell and not os.path.isfile(file)
        tree = self._source.parsed() if file == self.cell else parsed_lines(linecache.getlines(file))
        return codes_of(tree, file, flags, is_cell, LOOPS)

    def _count_step(self, *_: Any) -> None:
        if self._is_here():
            self.steps += 1

    def _is_here(self) -> bool:
        """Return whether the cell's own thread asks: not a worker of a loader, nor a thread of the program."""
        return self._place == (os.getpid(), threading.get_ident())

    # -- what marked code calls

    def loop(self, number: int) -> _OpenLoop | nullcontext[None]:
        """Return a loop that is to be opened."""
        return _OpenLoop(self, self.program.sites[number]) if self._is_here() else nullcontext()

    def over(self, number: int, iterable: Any) -> Any:
        """Return the items of a loop that is open now."""
        top = self._top(number)
        return iterable if top is None else top.begin(iterable)

    def turn(self, number: int) -> bool:
        """Note that a `while` is about to ask its test."""
        loops = self.open_loops
        if loops and (top := loops[-1]).steps != self.steps and top.site.number == number and self._is_here():
            self.at_boundary(top, sys._getframe(1))
        return True

    def _top(self, number: int) -> _OpenLoop | None:
        top = self.open_loops[-1] if self.open_loops and self._is_here() else None
        return top if top is not None and top.site.number == number and top.items is None else None

    # -- a run that goes on; see `_Way`

    @property
    def way(self) -> _Way:
        """The way to the position of a run that goes on."""
        assert self._way is not None, "only code that goes on asks"
        return self._way

    def leave_out(self) -> None:
        """Stand in the place of a statement that has trained and is over."""
        self.way.come_to_head(sys._getframe(1))

    def head(self) -> None:
        """Stand at the head of the outermost loop."""
        self.way.come_to_head(sys._getframe(1))

    def bind_globals(self) -> None:
        """Bind the names of the cell."""
        self.way.bind_globals()

    def has(self, frame: int, name: str) -> bool:
        """Return whether a local has a value of the saved run."""
        return f"{frame}:{name}" in self.way.names

    def value(self, frame: int, name: str) -> Any:
        """Return the value of a local."""
        return self.way.names[f"{frame}:{name}"]

    def fill(self) -> None:
        """Fill what the statements of this frame have made again."""
        self.way.fill(sys._getframe(1))

    def arm(self, frame: int) -> None:
        """Let the function of this frame of the position go on when it is called next."""
        self.way.armed = frame

    def enters(self, frame: int) -> bool:
        """Return whether this call of a function goes on."""
        return self._way is not None and self._way.enters(frame)

    def begin(self, loop: int) -> None:
        """Repeat what the head of an open loop drew."""
        self.way.begin(loop)

    def rest(self, number: int, _: None, iterable: Any, is_last: bool) -> Any:
        """Return the items of an open loop that are left; of an enclosing one the last that it had comes again."""
        top = self._top(number)
        assert top is not None, "its head stands before"
        return self.way.rest(top, iterable, is_last)

    def is_first(self, loop: int) -> bool:
        """Return whether a round of an open loop is the one that goes on."""
        return self._way is not None and self._way.is_first(loop)

    def is_again(self, loop: int) -> bool:
        """Return whether the test of an open `while` was passed by the saved run."""
        return self._way is not None and self._way.is_again(loop)

    def arrive(self) -> None:
        """Go on: the position is reached."""
        self.way.arrive(self.open_loops[-1])

    # -- what loops call

    def opened(self, loop: _OpenLoop) -> None:
        """Note that a loop begins; the outermost one is a head, but of a run that has trained or goes on."""
        is_outermost = not self.open_loops
        self.open_loops.append(loop)
        if is_outermost and not self.ended and (self._way is None or self._way.has_arrived):
            self.take_head(loop.frame)

    def take_head(self, frame: types.FrameType | None) -> Roots:
        """Tell the watcher of a head."""
        standings = self.standings(frame)
        self.head_locals = [set(locals_of(each)) for each in standings]
        roots = self.roots(standings)
        self._watcher.at_head(roots)
        return roots

    def closed(self, loop: _OpenLoop) -> None:
        """Note that a loop has ended, also by an error; if it was the outermost one and has trained, it is over."""
        self.open_loops.pop()
        if self.open_loops or loop.steps_at_head == self.steps:
            return
        self.ended.append([])
        try:
            standings = self.standings(loop.frame, is_strict=True)
            for each in standings:
                site = loop.site if each is standings[-1] else None
                self.ended[-1].append(path_of(each, site, is_inside=False))
        except NoPosition as error:
            self.ended_at_no_position = str(error)

    def at_boundary(self, loop: _OpenLoop, frame: types.FrameType) -> None:
        """Tell the watcher of a boundary.

        Raises:
            CannotResume: The saved run had a part of a batch in its hands, and this one has trained on it.
        """
        loop.steps = self.steps
        loop.keeps |= loop.taken == self.draws.taken and self.draws.held > 0
        if self._way is not None and self._way.has_arrived:
            self._way.refuse_part_in_hand(loop)
        self._watcher.at_boundary(Boundary(self, loop, frame))
        loop.taken = self.draws.taken

    def standings(self, frame: types.FrameType | None, is_strict: bool = False) -> list[Standing]:
        """Return the user's frames from the cell to this one."""
        assert frame is not None, "a loop that is open has one"
        return users_frames(self.program, frame, self.cell, is_strict)

    def roots(self, standings: Sequence[Standing]) -> Roots:
        """Return the values of all names."""
        found = {name: value for name, value in self.namespace.items() if not name.startswith("__")}
        for number, each in enumerate(standings[1:], 1):
            found |= {f"{number}:{name}": value for name, value in locals_of(each).items()}
        return found

    def _note_drawn(self, drawn: LoaderDraw) -> None:
        """Give an iterator of a loader to the `for` whose head, or whose next item, has made it."""
        if not self.open_loops or isinstance((top := self.open_loops[-1]).site.node, ast.While):
            return
        frame: types.FrameType | None = sys._getframe(1)
        if top.items is not None:
            while frame is not None and frame is not top.frame and frame.f_code is not _Items.__next__.__code__:
                frame = frame.f_back
            if frame is None or frame.f_code is not _Items.__next__.__code__:
                return  # the body of the loop made it
        top.drawn.append(drawn)


class _OpenLoop:
    """A loop that is open.

    Attributes:
        steps: Of the run, when its last boundary was.
        head: The random states at its head; None where it draws none.
        drawn: Of iterators of loaders that its head, or its items, have made.
        items: Of a `for` that has begun.
        taken: How many batches loaders had handed out at its last boundary.
        held: The batch that the program may have had in its hands when the loop began, see `LoaderDraws`.
        keeps: A round of it has trained on a batch that an earlier one, or a loop around it, has taken.
    """

    __slots__ = (
        *("cell", "drawn", "frame", "head", "held", "items", "keeps", "site", "steps", "steps_at_head", "taken"),
    )

    def __init__(self, cell: MarkedCell, site: LoopSite) -> None:
        self.cell = cell
        self.site = site
        self.steps = self.steps_at_head = cell.steps
        self.frame: types.FrameType | None = None
        self.head: dict[str, Any] | None = None
        self.drawn: list[LoaderDraw] = []
        self.items: _Items | None = None
        self.taken, self.held, self.keeps = cell.draws.taken, cell.draws.held, False

    def __enter__(self) -> None:
        self.frame = sys._getframe(1)
        self.cell.opened(self)
        if not self.site.is_quiet:
            self.head = random_states.read()

    def __exit__(self, *error: object) -> None:
        try:
            if self.cell.open_loops and self.cell.open_loops[-1] is self:
                self.cell.closed(self)
        finally:
            self.frame = self.items = None

    def begin(self, iterable: Any) -> _Items:
        """Return the items of a `for`."""
        if self.head is None and not is_known(iterable):
            self.head = random_states.read()
        self.items = _Items(self, iterable)
        return self.items


class _Items:
    """The items of a `for`.

    Attributes:
        iterator: Hands them out.
        kind: The name of the class of what it was made of, if only that class knows what `iter` of it does.
        range: The limits of a `range`, which may be other ones when its head is evaluated again.
        taken: How many it has had.
        at: The last one, if it is a number or a text; a number for it, if it is to be compared.
        again: The item that comes once more, of a run that goes on.
    """

    __slots__ = ("_cell", "_is_compared", "_loop", "again", "at", "iterator", "kind", "range", "taken")

    def __init__(self, loop: _OpenLoop, iterable: Any) -> None:
        self._loop = loop
        self._cell = loop.cell
        is_passable = is_known(iterable) or is_iterator(iterable) or hands_out_by_number(iterable)
        self.kind = "" if is_passable else type(iterable).__name__
        self.range = [iterable.start, iterable.stop, iterable.step] if type(iterable) is range else None
        self.iterator: Iterator[Any] = iter(iterable)
        self.taken = 0
        self.at: Any = None
        self.again: list[Any] = []
        self._is_compared: bool | None = None  # a bar says what it takes from with its first item

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.again:
            return self.again.pop()
        loop = self._loop
        if loop.steps != self._cell.steps:
            self._cell.at_boundary(loop, sys._getframe(1))
        item = next(self.iterator)
        self.taken += 1
        if self._is_compared is None:
            self._is_compared = is_compared(self.iterator)
        if type(item) in _SHOWN_ITEMS:
            self.at = item
        else:
            self.at = [digest_of(item)] if self._is_compared else None
        return item


class Boundary:
    """A place between two rounds of a loop.

    Args:
        cell: The cell.
        loop: The loop that is about to begin a round.
        frame: It runs in it.
    """

    def __init__(self, cell: MarkedCell, loop: _OpenLoop, frame: types.FrameType) -> None:
        self._cell = cell
        self._loop = loop
        self._frame = frame
        self.line = loop.site.line
        self.steps = cell.steps
        self._found: tuple[list[Standing], list[Path]] | None = None

    def refusal(self) -> str:
        """Return why a run could not go on exactly here; empty if it could."""
        try:
            self._paths()
        except NoPosition as error:
            return str(error)
        return ""

    def around(self) -> Boundary:
        """Return the boundary of the innermost enclosing loop between whose rounds a run can be saved.

        Raises:
            NoPosition: There is none.
        """
        refusal = ""
        for loop in reversed(self._loops()[:-1]):
            assert loop.frame is not None, "it is open"
            if loop.items is None and isinstance(loop.site.node, ast.For):
                continue  # its head is being evaluated
            other = Boundary(self._cell, loop, loop.frame)
            if not (why := other.refusal()):
                return other
            refusal = refusal or why
        raise NoPosition(self.refusal() or refusal)

    def roots(self) -> Roots:
        """Return the values of all names now."""
        return self._cell.roots(self._cell.standings(self._frame))

    def frames_at_head(self) -> int:
        """Return how many of its frames a run that goes on has at its head.

        It leaves out what has trained and is over, so its head is the first such statement, or the outermost loop.
        """
        standings, paths = self._paths()
        for ended in self._cell.ended[:1]:
            both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ended, paths, strict=False))
            return len([*both]) + 1
        return len(standings)

    def can_wait(self, root: str) -> bool:
        """Return whether no statement on the way reads a root: between a training that is over and the position.

        A local of a function is bound where its frame goes on, and never later.
        """
        if not self._cell.ended:
            return True
        if ":" in root:
            return False
        standings, paths = self._paths()
        first, last = self._cell.ended[0][0][0][0], paths[0][0][0]
        nodes = (node for each in standings[0].function.body[first : last + 1] for node in ast.walk(each))
        return not any(isinstance(node, ast.Name) and (node.id, type(node.ctx)) == (root, ast.Load) for node in nodes)

    def can_make(self, root: str) -> bool:
        """Return whether a run that goes on runs the statement again that binds a root."""
        standings, paths = self._paths()
        number, _, name = root.rpartition(":")
        frame = int(number or 0)
        return frame < len(paths) and name in self._made_again(standings, paths, frame)

    def is_read(self, root: str) -> bool:
        """Return whether a run that goes on here may read a root before it binds it, judging by names."""
        standings, paths = self._paths()
        number, _, name = root.rpartition(":")
        standing, path = standings[int(number or 0)], paths[int(number or 0)]
        others = self._cell.program.mentioned_elsewhere(standing.function)
        if not READS_BY_TEXT.isdisjoint(others) or name in (
            others if not number else standing.frame.f_code.co_cellvars
        ):
            return True
        names = standing.frame.f_globals | standing.frame.f_locals
        texts = ["\n".join(map(ast.unparse, statements)) for statements in ahead(standing.function.body, path)]
        return any(name in read_before_made(text, names) for text in texts)

    def position(self) -> dict[str, Any]:
        """Return where a run goes on, as plain data.

        Raises:
            NoPosition: It could not, see `refusal`.
        """
        standings, paths = self._paths()
        numbers = {each.frame: number for number, each in enumerate(standings)}
        head = self._cell.head_locals or []
        frames = []
        for number, (each, path) in enumerate(zip(standings, paths, strict=True)):
            names = set(locals_of(each)) if number else set()
            had = head[number] if 0 < number < len(head) else set()
            function = each.function
            frames.append(
                {
                    "name": function.name,
                    "mark": function.mark,
                    "text": function.text,
                    "path": [[*step] for step in path],
                    "locals": sorted(names),
                    "deleted": sorted(had - names),
                }
            )
        loops = [_record(loop, numbers[loop.frame]) for loop in self._loops() if loop.frame is not None]
        ended = [[[[*step] for step in path] for path in paths] for paths in self._cell.ended]
        held = self._cell.draws.held if batches_are_parts() else 0
        return {"frames": frames, "loops": loops, "ended": ended, "steps": self.steps, "held": held}

    def _loops(self) -> list[_OpenLoop]:
        """Return the open loops up to this one."""
        loops = self._cell.open_loops
        return loops[: loops.index(self._loop) + 1]

    def _paths(self) -> tuple[list[Standing], list[Path]]:
        if self._found is None:
            standings = self._cell.standings(self._frame, is_strict=True)
            if self._cell.ended_at_no_position:
                raise NoPosition(self._cell.ended_at_no_position)
            loops = self._loops()
            paths = []
            for each in standings:
                is_inside = any(loop.frame is each.frame or _is_above(loop, each, standings) for loop in loops)
                paths.append(path_of(each, self._loop.site if each is standings[-1] else None, is_inside))
                self._refuse_unmarked(each, paths[-1], loops)
            for loop in loops:
                _refuse_unpassable(loop)
            if batches_are_parts():
                _refuse_part_in_hand(*loops)
            self._found = standings, paths
        return self._found

    def _refuse_unmarked(self, standing: Standing, path: Path, loops: Sequence[_OpenLoop]) -> None:
        """Refuse a position within a loop that is not open: it was not marked."""
        here = [loop.site.path for loop in loops if loop.frame is standing.frame]
        body = standing.function.body
        for depth, (at, name) in enumerate(path):
            node = body[at]
            is_loop = isinstance(node, ast.For | ast.AsyncFor | ast.While) and name in ("", "body")
            if is_loop and (*path[:depth], (at, "")) not in here:
                raise NoPosition(
                    f"the loop in line {node.lineno} leads to the training by names that do not say so, and how far it "
                    "has come is not known. Call the function that trains by its own name in it."
                )
            body = dict(blocks_of(node))[name] if name else []

    def _made_again(self, standings: Sequence[Standing], paths: Sequence[Path], frame: int) -> set[str]:
        """Return the names of a frame whose binding statements run again, since they stand before the position.

        Not those that were there at the head: it is that of the outermost loop, unless a statement before has trained.
        """
        outer = next(number for number, each in enumerate(standings) if each.frame is self._loops()[0].frame)
        ended = [each[frame] for each in self._cell.ended if len(each) > frame and each[:frame] == paths[:frame]]
        is_open, found = frame > outer or bool(self._cell.ended), set[str]()
        if frame and is_open:
            code = standings[frame].frame.f_code
            found |= {*code.co_varnames[: _parameters(code)]}
        body = standings[frame].function.body
        for depth, (at, name) in enumerate(paths[frame]):
            if is_open:
                left_out = {each[depth][0] for each in ended if each[:depth] == paths[frame][:depth]}
                again = (before for number, before in enumerate(body[:at]) if number not in left_out)
                found |= {each for before in again for each in bound_by(before)}
            node = body[at]
            if isinstance(node, ast.With):
                found |= {each for item in node.items if item.optional_vars for each in bound_by(item.optional_vars)}
            is_open = is_open or isinstance(node, ast.For | ast.While)
            body = dict(blocks_of(node))[name] if name else []
        return found


def _is_above(loop: _OpenLoop, standing: Standing, standings: Sequence[Standing]) -> bool:
    """Return whether a loop is open in a frame above this one."""
    frames = [each.frame for each in standings]
    return loop.frame in frames and frames.index(loop.frame) < frames.index(standing.frame)


def _parameters(code: types.CodeType) -> int:
    variable = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + variable


def _record(loop: _OpenLoop, frame: int) -> dict[str, Any]:
    items = loop.items
    return {
        "frame": frame,
        "line": loop.site.line,
        "taken": 0 if items is None else items.taken - further_parts(items.iterator),
        "at": None if items is None else items.at,
        "range": None if items is None else items.range,
        "head": loop.head,
        "drawn": [each.record() for each in loop.drawn],
    }


def _refuse_part_in_hand(*loops: _OpenLoop) -> None:
    """Refuse a place where the next round trains on a batch that is there: rank 0 alone writes names.

    Raises:
        NoPosition: Each rank has its part of that batch.
    """
    *enclosing, loop = loops
    if any(each.keeps for each in loops) or any(loop.held > each.taken for each in enclosing):
        raise NoPosition(
            f"the loop in line {loop.site.line} trains more than once on a batch, of which each rank has a part in its "
            "hands. A loop over the loader, with one over these steps in it, can go on before each batch"
        )


def _refuse_unpassable(loop: _OpenLoop) -> None:
    """Refuse a loop over what cannot be brought to its place by passing over items.

    Raises:
        NoPosition: It is such a loop.
    """
    if loop.items is None:
        return
    node, line = loop.site.node, loop.site.line
    assert isinstance(node, ast.For), "a `while` has no items"
    what = with_article(loop.items.kind) if loop.items.kind else obstacle_to_passing(loop.items.iterator)
    if loop.drawn and has_generator(loop.items.iterator):
        what = "a generator over a loader"
    if what:
        raise NoPosition(
            f"line {line} loops over {what}, and how far it has come is known to nobody. A loop over the loader, or a "
            "list, can go on in its middle."
        )
    frame = loop.frame
    assert frame is not None, "it is open"
    for each in ast.walk(node.iter):
        if isinstance(each, ast.Name):
            value = frame.f_locals.get(each.id, frame.f_globals.get(each.id))
            is_placed = value is loop.items.iterator and DRAWN in getattr(value, "__dict__", ())
            if hasattr(type(value), "__next__") and not is_placed:
                raise NoPosition(
                    f"line {line} loops over `{each.id}`, which had begun before, and how far it has come is known to "
                    "nobody. A loop over what it was made of can go on in its middle."
                )


class _Way:
    """The way of a run to the position of a saved one.

    Args:
        cell: The cell that goes on.
        saved: The saved run.

    Attributes:
        entries: The frames of the position, with their functions.
        names: The roots to bind, once the head is reached.
        armed: The frame whose function goes on when it is called next.
    """

    def __init__(self, cell: MarkedCell, saved: GoingOn) -> None:
        self._cell = cell
        self._saved = saved
        self._loops: Sequence[Mapping[str, Any]] = saved.position["loops"]
        self._ended = [[_path(path) for path in paths] for paths in saved.position["ended"]]
        self.names: dict[str, Any] = {}
        self.armed = 0
        self.has_arrived = False
        self._is_at_head = False
        self._first = [True] * len(self._loops)
        self._again = [True] * len(self._loops)
        self._is_first_round = True
        self.entries = [*self._entries()]

    def _entries(self) -> Iterator[tuple[UsersFunction, GoesOnAt]]:
        frames = self._saved.position["frames"]
        made_again = [*self._saved.unsaved, *self._saved.made]
        for number, frame in enumerate(frames):
            path = _path(frame["path"])
            above = [_path(each["path"]) for each in frames[:number]]
            loops = [at for at, loop in enumerate(self._loops) if loop["frame"] == number]
            here = GoesOnAt(
                number,
                path,
                is_inside=any(loop["frame"] < number for loop in self._loops),
                first_loop=loops[0] if loops else 0,
                names=frame["locals"],
                deleted=frame["deleted"],
                made_again={name for root in made_again if (name := _name_in(root, number))},
                is_filled=any(_name_in(root, number) for root in self._saved.made),
                over=[paths[number] for paths in self._ended if len(paths) > number and paths[:number] == above],
            )
            for function in self._functions(frame):
                yield function, here

    def _functions(self, frame: Mapping[str, Any]) -> list[UsersFunction]:
        program = self._cell.program
        if frame["name"] == CELL:
            there = program.of_cell(self._cell.cell)
            found, others = [each for each in there if each.mark == frame["mark"]], there
        else:
            found, others = program.named(frame["name"], frame["mark"]), program.with_name(frame["name"])
        if not found:
            raise CannotResume(_other_source(frame, others))
        return found

    # -- on the way

    def come_to_head(self, frame: types.FrameType) -> None:
        """Compare and write the contents; at a later head, after a statement that was left out, write them again."""
        if self._is_at_head:
            self.names |= self._saved.write_again(self._cell.roots(self._cell.standings(frame)), is_last=False)
            self.bind_globals()
            return
        self._is_at_head = True
        self._cell.ended = [*self._ended]
        standings = self._cell.standings(frame)
        self._cell.head_locals = [set(locals_of(each)) for each in standings]
        self.names = {**self._saved.at_head(self._cell.roots(standings))}
        self.bind_globals()

    def bind_globals(self) -> None:
        """Bind the names of the cell."""
        self._cell.namespace.update({name: value for name, value in self.names.items() if ":" not in name})

    def fill(self, frame: types.FrameType) -> None:
        """Fill what the statements of a frame have made again."""
        self.names |= self._saved.fill(self._cell.roots(self._cell.standings(frame)))
        self.bind_globals()

    def enters(self, frame: int) -> bool:
        """Return whether this call of a function goes on; once for each frame."""
        if self.armed != frame:
            return False
        self.armed = 0
        return True

    def begin(self, number: int) -> None:
        """Draw as the head of an open loop did."""
        loop = self._loops[number]
        if loop["head"] is not None:
            random_states.restore(loop["head"])
        self._cell.draws.expect(loop["drawn"])
        self._current = loop

    def rest(self, top: _OpenLoop, iterable: Any, is_last: bool) -> _Items:
        """Pass over the items that an open loop had.

        Raises:
            CannotResume: They are other ones now.
        """
        loop = self._current
        top.head = loop["head"]
        top.items = items = _Items(top, range(*loop["range"]) if loop["range"] else iterable)
        is_placed = DRAWN in getattr(items.iterator, "__dict__", ()) and not top.drawn
        if is_placed:
            items.again.append(None)
        else:
            self._pass_over(items, loop, is_last)
        items.taken = loop["taken"]
        if is_last:
            items.again.clear()
            self.arrive(top)
        return items

    def _pass_over(self, items: _Items, loop: Mapping[str, Any], is_last: bool) -> None:
        is_drawn_only = is_last and loop["at"] is None
        try:
            self._cell.draws.pass_over(items.iterator, loop["taken"] - (not is_drawn_only))
            if not is_drawn_only:
                items.again.append(next(items))
        except StopIteration:
            raise CannotResume(
                f"the loop in line {loop['line']} has fewer items than the {loop['taken']} that it had in the run that "
                "is continued: it is over other data now"
            ) from None
        self._compare(items, loop)

    def _compare(self, items: _Items, loop: Mapping[str, Any]) -> None:
        where = f"the loop in line {loop['line']}"
        if not self._cell.draws.passed():
            raise CannotResume(
                f"{where} draws other samples than in the run that is continued: its loader's sampler depends on more "
                "than random states. Give it a seed, or a generator."
            )
        if loop["at"] is not None and items.at != loop["at"]:
            is_number = isinstance(items.at, list) or isinstance(loop["at"], list)
            then, now = ("another item", "this one") if is_number else (repr(loop["at"]), repr(items.at))
            raise CannotResume(
                f"{where}, in which the run that is continued was at {then}, comes to {now} there: its items have "
                "another order now (a set? sort it)"
            )

    def is_first(self, number: int) -> bool:
        """Return whether a loop is in the round that goes on."""
        was, self._first[number] = self._first[number], False
        return was

    def is_again(self, number: int) -> bool:
        """Return whether a `while` has yet to go on with the round that the saved run had begun."""
        was, self._again[number] = self._again[number], False
        return was

    def arrive(self, innermost: _OpenLoop) -> None:
        """Go on from here."""
        self.names |= self._saved.write_again(self._cell.roots(self._cell.standings(innermost.frame)), is_last=True)
        self.bind_globals()
        self._cell.steps = int(self._saved.position["steps"])
        self.has_arrived = True
        self._saved.arrived()
        draws = self._cell.draws
        draws.taken = draws.held = int(self._saved.position["held"])
        for loop in self._cell.open_loops:
            loop.steps, loop.taken = self._cell.steps, draws.taken
            loop.steps_at_head = -1  # they have trained

    def refuse_part_in_hand(self, loop: _OpenLoop) -> None:
        """Refuse to go on if the first round has trained on a batch of the saved run: every rank had rank 0's part.

        Raises:
            CannotResume: It has.
        """
        held = int(self._saved.position["held"])
        if self._is_first_round and 0 < held == self._cell.draws.taken:
            raise CannotResume(
                f"the checkpoint was written when each rank had a part of a batch in its hands, and the loop in line "
                f"{loop.site.line} trains on that batch once more. Name an older one (--resume PATH), or leave "
                "--resume out to start anew."
            )
        self._is_first_round = False


def _path(steps: Sequence[Sequence[Any]]) -> Path:
    return tuple((int(at), str(name)) for at, name in steps)


def _name_in(root: str, frame: int) -> str:
    """Return the name of a root in a frame; empty if it is of another frame."""
    number, _, name = root.rpartition(":")
    return name if int(number or 0) == frame else ""


def _other_source(frame: Mapping[str, Any], others: Sequence[UsersFunction]) -> str:
    """Return the sentence about a source that is not that of the saved run."""
    said = "the cell is another one" if frame["name"] == CELL else f"`{frame['name']}` has other code"
    said += " than when this checkpoint was written"
    if not others:
        return f"{said}: there is none of that name. Run the cells above, or leave --resume out to begin anew."
    now, then = others[-1].text, frame["text"]
    for kind, first, last, start, end in difflib.SequenceMatcher(None, then, now, autojunk=False).get_opcodes():
        if kind != "equal":
            was = then[first].strip() if first < last else "nothing"
            comes = now[start].strip() if start < end else "nothing"
            return f"{said} (`{comes}`, was `{was}`). Leave --resume out to begin anew."
    return f"{said}. Leave --resume out to begin anew."


def _trees(files: Mapping[str, Sequence[types.FunctionType]], cell: str) -> dict[str, ast.Module]:
    """Return the trees of files and earlier cells whose text is Python."""
    found: dict[str, ast.Module] = {}
    for name in files:
        if name != cell:
            with suppress(SyntaxError, ValueError, RecursionError):
                found[name] = parsed_lines(linecache.getlines(name))
    return found
