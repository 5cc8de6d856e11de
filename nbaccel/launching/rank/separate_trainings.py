"""Find out whether an optimizer steps one training in all ranks, before it changes anything. Runs in ranks.

`OneTraining` decides once for each optimizer, by evidence and never by a library's name: parameters that something
synchronises pass, for others the ranks compare gradients. `UpdatesByHand` finds updates without a step of torch's
optimizers, at the backwards, one step later. Parameters that a cell has trained are compared again at its end, see
`parameters.checksum`. The ranks compare on the control page, without a collective.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from nbaccel.base.notices import unignored
from nbaccel.base.world import World
from nbaccel.errors import NotPrepared
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.import_hooks import Assignment, Change, Changes, Prepare, when_loaded
from nbaccel.launching.ipc.rank_part import RankPart, RankTask
from nbaccel.launching.ipc.spec import Results, TaskWatch
from nbaccel.launching.ipc.user_code import is_users
from nbaccel.namespace.arrays import has_plain_memory
from nbaccel.namespace.parameters import fingerprint, number

__all__ = [
    "Judge",
    "OneTraining",
    "UpdatesByHand",
    "library_that_trains",
    "note_wrappers",
    "sequence_number",
    "warn_at_users_line",
    "wrappers_noted",
]

_LONGEST_WAIT_S = 5.0
_POLL_S = 0.001

_SYNCHRONISE = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
}
"""Modules, and their classes that synchronise the gradients of the model inside."""


class OneTraining(RankPart):
    """Judges the optimizers of one rank.

    Parameters that DDP or FSDP synchronises pass, and so do DTensors and parameters that a `TaskWatch` keeps equal. For
    others the ranks compare a fingerprint of this step's gradients. Different fingerprints mean separate trainings,
    which is an error; equal ones mean gradients that were synchronised by hand, or the same work in every rank, and one
    notice says which. A rank whose peers take no such step within 5 s steps alone, and says so.

    Args:
        is_watching: Whether it judges at all; else it only reports.

    Attributes:
        wrappers: Models that the program has wrapped in one of the classes that synchronise, as long as they live.
    """

    def __init__(self, page: ControlPage, world: World, is_watching: bool) -> None:
        self._page = page
        self._world = world
        self._is_watching = is_watching
        self._peers: Sequence[int] = [rank for rank in range(world.world_size) if rank != world.rank]
        self._settled: dict[int, weakref.ref[Any]] = {}  # by id, since the user's class may have no hash
        self._waits: dict[int, weakref.ref[Any]] = {}  # stepped once, after ranks had exchanged something
        self.wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._judged: Counter[int] = Counter()  # optimizers by their kind and shapes
        self._laid: list[int] = []  # keys of this rank, in their order
        self._begun_with = 0
        self._has_said = False  # the notice that all ranks do the same
        self._was_warned = False
        self._refused: NotPrepared | None = None
        me = weakref.proxy(self)  # the kernel, which makes it, drops it at once
        self._by_hand = UpdatesByHand(me)
        self._wrapping = Changes(wrappers_noted(self.wrappers, lambda: me._note_wrapper()))
        self._equal_watch: TaskWatch | None = None

    def install(self) -> None:
        """Judge every optimizer before its step, from now on."""
        if not self._is_watching:
            return
        when_loaded({"torch.optim.optimizer": self._hook})
        if "torch.autograd" not in sys.modules:  # else each task begins with it
            when_loaded({"torch.autograd": lambda _: self._watch_backwards()})
        self._wrapping.put()

    def begin(self, running: RankTask) -> None:
        self._equal_watch = running.equal_watch
        excluded = (self._world.rank, *running.excluded_ranks)
        self._peers = [rank for rank in range(self._world.world_size) if rank not in excluded]
        self._judged.clear()
        self._laid.clear()
        self._begun_with = self._collectives()
        self._has_said = self._was_warned = False
        self._refused = None
        self._watch_backwards()

    def _note_wrapper(self) -> None:
        if self._equal_watch is not None:
            self._equal_watch.note_wrapper()

    def _watch_backwards(self) -> None:
        self._by_hand.end()  # left by a task that failed
        if self._is_watching and self._peers:
            self._by_hand.begin()

    def end(self) -> None:
        """End a task that finished.

        Raises:
            NotPrepared: It was refused, and the program went on: ``except Exception`` around a batch does that.
        """
        self._by_hand.end()
        if self._refused is not None:
            raise self._refused

    def facts(self, status: str, results: Results) -> dict[str, bool]:
        """Return whether this rank exchanged data, was warned, has prepared models.

        raw_loop: it trained without having prepared anything.
        """
        return {
            "exchanged": self.has_exchanged() or self._is_raw_loop,
            "raw_loop": self._is_raw_loop,
            "was_warned": self._was_warned or self._has_said,
            "has_prepared": bool(self.wrappers),
        }

    def _hook(self, module: Any) -> None:
        module.register_optimizer_step_pre_hook(self._before_step)

    # -- before a step

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(optimizer) in self._settled or not self._peers:
            return None
        parameters = self._alone(optimizer)
        if not parameters or (self.wrappers and not _has_model(parameters)):
            # Tensors that nothing synchronises, of no model, beside a synchronised model: inputs, for example.
            self._settle(optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._judge(optimizer, parameters)
            return None
        judged = self._judging(closure, optimizer, parameters)  # gradients come with its first call
        return ((args[0], *args[2:]), {**kwargs, "closure": judged})

    def _judging(self, closure: Callable[[], Any], optimizer: Any, parameters: Sequence[Any]) -> Callable[[], Any]:
        def judged() -> Any:
            loss = closure()
            if id(optimizer) not in self._settled:
                self._judge(optimizer, parameters)
            return loss

        return judged

    def _judge(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        """Compare this step with the peers.

        Raises:
            NotPrepared: Another rank steps with other gradients, or steps another optimizer.
        """
        alone = [parameter for parameter in parameters if not self.keeps(parameter)]
        found = fingerprint(parameter.grad for parameter in alone)
        if found is None:  # nothing else would change
            if len(alone) < len(parameters):
                self._settle(optimizer)
            return
        if id(optimizer) not in self._waits and self.has_exchanged():
            # The ranks have exchanged data, and may do so again before the step. The second step shows it.
            _remember(optimizer, self._waits)
            return
        kind = _kind(optimizer)
        self._judged[kind] += 1
        key = number(kind.to_bytes(8, "big") + self._judged[kind].to_bytes(4, "big"))
        apart, missing = self._compare(key, found)
        if apart:
            self._refuse(optimizer, alone, apart)
        self._settle(optimizer)
        if missing:
            self._say_alone(optimizer, missing)
        elif self._world.is_main_process:
            self._say_equal(optimizer)

    def _compare(self, key: int, found: int) -> tuple[list[int], list[int]]:
        """Return the peers whose step differs, and those that take no such step. It waits for them 5 s at most."""
        laid, apart, missing = self._wait_for_peers(key, found)
        # A peer that steps what this rank never did trains something else; one that is late, or done, does not.
        elsewhere = [peer for peer in missing if any(other % 2 for other in laid[peer].keys() - set(self._laid))]
        return apart + elsewhere, [peer for peer in missing if peer not in elsewhere]

    def _wait_for_peers(self, key: int, found: int) -> tuple[dict[int, dict[int, int]], list[int], list[int]]:
        """Return the entries of each peer, the peers whose number for `key` differs, and those that have none."""
        page = self._page
        page.lay(self._world.rank, len(self._laid), key, found)
        self._laid.append(key)
        until = time.monotonic() + _LONGEST_WAIT_S
        while True:
            laid = {peer: page.laid(peer) for peer in self._peers}
            apart = [peer for peer, entries in laid.items() if entries.get(key, found) != found]
            missing = [peer for peer, entries in laid.items() if key not in entries]
            waits = [peer for peer in missing if not page.has_finished(peer)]
            if apart or not waits or time.monotonic() > until:
                return laid, apart, missing
            time.sleep(_POLL_S)  # ended by the peers' entries, by their end, or by the limit

    def _collectives(self) -> int:
        """Return the number of collectives that this rank has entered: nbaccel's and those of torch's default group."""
        return self._page.collectives(self._world.rank) + (sequence_number() or 0)

    # -- for updates by hand

    def has_exchanged(self) -> bool:
        """Return whether the program has exchanged data; for a task that a watch keeps equal, counts prove nothing."""
        return not self._is_raw_loop and self._collectives() != self._begun_with

    def keeps(self, leaf: Any) -> bool:
        return self._equal_watch is not None and self._equal_watch.keeps([leaf])

    @property
    def _is_raw_loop(self) -> bool:
        return self._equal_watch is not None and self._equal_watch.is_at_work

    def settled(self) -> set[int]:
        optimizers = [optimizer for known in (*self._settled.values(), *self._waits.values()) if (optimizer := known())]
        stepped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        return stepped | {id(parameter) for wrapper in self.wrappers for parameter in _kept_together(wrapper)}

    def compare_values(self, key: int, found: int) -> tuple[list[int], list[int]]:
        _, apart, missing = self._wait_for_peers(key, found)
        return apart, missing

    def refuse_values(self, apart: Sequence[int]) -> None:
        self._raise(
            f"{self._world.place} has trained one model, and {_ranks(apart)} another: "
            "the parameters that this backward reaches have changed since the last one, and not alike."
        )

    def say_apart(self, apart: Sequence[int]) -> None:
        self._was_warned = True
        if self._world.is_main_process:
            warn_at_users_line(
                f"the tensors that this backward reaches have changed since the last one, in {_ranks(apart)} otherwise "
                "than here: each rank trains its own. To train one, average "
                'gradients before each update: p.grad = accelerator.reduce(p.grad, "mean").'
            )

    def say_same(self, is_model: bool) -> None:
        if not self._has_said and self._world.is_main_process:
            warn_at_users_line(
                f"what this backward reaches has changed alike in all {self._world.world_size} ranks, and they have "
                "exchanged nothing: each does the same work on the same data. "
                f"{_once_or_together() if is_model else '-n 1 does it once.'}"
            )
        self._has_said = True

    # -- what is known

    def _alone(self, optimizer: Any) -> list[Any]:
        """Return parameters that nothing is known to synchronise."""
        known = {id(parameter) for wrapper in self.wrappers for parameter in _kept_together(wrapper)}
        tensors: Any = sys.modules.get("torch.distributed.tensor")
        sharded = () if tensors is None else (tensors.DTensor,)
        return [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in known and not isinstance(parameter, sharded)
        ]

    def _settle(self, optimizer: Any) -> None:
        _remember(optimizer, self._settled)

    # -- what is said

    def _refuse(self, optimizer: Any, parameters: Sequence[Any], apart: Sequence[int]) -> None:
        world = self._world
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        what = "what it steps" if len(parameters) == count else f"{len(parameters)} of the {count} tensors it steps"
        self._raise(
            f"{type(optimizer).__name__}.step in {world.place}: nothing synchronises "
            f"{what}, and {_ranks(apart)} would step with other gradients."
        )

    def _raise(self, found: str) -> None:
        library = library_that_trains()
        remedy = (
            f"{library} trains by itself, and shares nothing out among ranks: run this cell with -n 1 or without the "
            "magic, or write the loop with accelerator.prepare.\n"
            if library
            else "Prepare what is trained, in this cell and before the loop:\n"
            "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        )
        why = "" if self._equal_watch is None else self._equal_watch.explain()
        self._refused = NotPrepared(
            f"{found} Each rank would train a model of its own, and one of {self._world.world_size} would come back. "
            f"{remedy}"
            "Separate trainings that are meant: %%accelerate --independent, or launch(..., independent=True)."
            + (why and f"\n{why}")
        )
        raise self._refused

    def _say_alone(self, optimizer: Any, missing: Sequence[int]) -> None:
        who = _ranks(missing)
        self._was_warned = True
        warn_at_users_line(
            f"{self._world.place} steps {type(optimizer).__name__} alone: {who} took "
            f"no such step within {_LONGEST_WAIT_S:g} s, and nothing synchronises what it steps. What it trains stays "
            "in this rank."
        )

    def _say_equal(self, optimizer: Any) -> None:
        """Say it once for each task: a search over many models would repeat it for each."""
        if self._has_said:
            return
        self._has_said = True
        name, ranks = type(optimizer).__name__, self._world.world_size
        if not self.has_exchanged():
            warn_at_users_line(
                f"{name} steps with equal gradients in all {ranks} ranks, and they have exchanged nothing: each does "
                f"the same work on the same data. {_once_or_together()}"
            )
        else:
            warn_at_users_line(
                f"{name} steps what was not prepared, with equal gradients in all {ranks} ranks: it is taken for "
                "synchronised by hand, and is not checked again before the cell ends."
            )


def sequence_number() -> int | None:
    """Return the number of collectives that torch has issued in the default process group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    group = distributed.distributed_c10d._get_default_group()
    kinds = {pair.rpartition(":")[2] for pair in distributed.get_backend_config().split(",")}
    # With "cpu:gloo,cuda:nccl" the group itself counts only one backend.
    counted = [group] if len(kinds) == 1 else [group._get_backend(device) for device in group._device_types]
    try:
        return sum(int(one._get_sequence_number_for_group()) for one in counted)
    except RuntimeError:  # a backend that does not count
        return None


def wrappers_noted(wrappers: weakref.WeakSet[Any], on_wrapped: Callable[[], None]) -> list[tuple[str, Prepare]]:
    """Return what adds every model that the program wraps for several ranks to `wrappers`.

    Args:
        on_wrapped: Called each time.
    """

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:  # no `__init__`: its warnings would name this file
        wrapper = object.__new__(cls)
        wrappers.add(wrapper)
        on_wrapped()
        return wrapper

    def prepare(name: str, module: Any) -> list[Change]:
        return [Assignment(getattr(module, name), "__new__", staticmethod(make))]

    return [(module, functools.partial(prepare, name)) for module, name in _SYNCHRONISE.items()]


def note_wrappers(wrappers: weakref.WeakSet[Any]) -> None:
    """Add every model that the program wraps from now on to `wrappers`. Called once per process."""
    Changes(wrappers_noted(wrappers, lambda: None)).put()


def _kept_together(wrapper: Any) -> Iterator[Any]:
    """Yield parameters that `wrapper` synchronises; also the parts of them that its own optimizer steps (ZeRO)."""
    if "_modules" not in vars(wrapper):
        return  # its constructor has raised
    yield from wrapper.parameters()
    for group in getattr(getattr(wrapper, "optimizer", None), "param_groups", ()):
        yield from group["params"]


def _remember(value: Any, known: dict[int, weakref.ref[Any]]) -> None:
    """Keep the id of `value` while `value` lives."""
    key = id(value)

    def forget(_: object) -> None:
        known.pop(key, None)

    known[key] = weakref.ref(value, forget)


def _kind(optimizer: Any) -> int:
    """Return a number that identifies the class of `optimizer` and the shapes that it steps."""
    shapes = [tuple(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]
    return number(repr((type(optimizer).__qualname__, shapes)).encode())


def _has_model(tensors: Sequence[Any]) -> bool:
    """Return whether parameters of models are among `tensors`."""
    kind = sys.modules["torch"].nn.Parameter
    return any(isinstance(tensor, kind) for tensor in tensors)


def _ranks(peers: Sequence[int]) -> str:
    return " and ".join(f"rank {peer}" for peer in sorted(peers))


def _once_or_together() -> str:
    """Return what to do instead of the same work in every rank."""
    library = library_that_trains()
    if library:
        return f"{library} trains by itself, and shares nothing out among ranks: -n 1 does it once."
    return "model, optimizer, loader = accelerator.prepare(model, optimizer, loader) before the loop shares it out."


def warn_at_users_line(text: str) -> None:
    """Warn at the user's line."""
    frame, _ = _users_line()
    with unignored():
        if frame is None:
            warnings.warn(text, stacklevel=2)
        else:
            warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def library_that_trains() -> str:
    """Return the library's function that runs the loop, as "fit of skorch"; "" for a loop of the user's own."""
    frame, below = _users_line()
    if frame is None or not below:
        return ""
    named = frame.f_code.co_names
    called = next((each for each in below if each.f_code.co_name in named), below[0])  # not a decorator's wrapper
    package, function = str(called.f_globals.get("__name__", "")).partition(".")[0], called.f_code.co_name
    return "" if package in {"torch", "nbaccel"} or function == "step" else f"{function} of {package}"


def _users_line() -> tuple[FrameType | None, list[FrameType]]:
    """Return the innermost frame of the user's, and the frames that it has called, outermost first."""
    torchs = os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    below: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith(torchs):
            return frame, below[::-1]
        below.append(frame)
        frame = frame.f_back
    return None, []


_MOST_EMPTY = 3  # comparisons that found only synchronised values: the loop does no updates by hand
_LOOKS = frozenset({1, *(2**power + 1 for power in range(10))})
"""Numbers of the backwards before which values are read: the 1st, to know what changes, then 2, 3, 5 ... 513."""


class Judge(Protocol):
    """Knows the other work of the ranks, and reports the findings."""

    def has_exchanged(self) -> bool:
        """Return whether this rank has entered a collective in this task."""

    def settled(self) -> set[int]:
        """Return ids of parameters that something synchronises, or whose optimizers have been judged already."""

    def keeps(self, leaf: Any) -> bool:
        """Return whether the watch of this task keeps `leaf` equal in all ranks."""

    def compare_values(self, key: int, found: int) -> tuple[list[int], list[int]]:
        """Return the peers whose values differ at `key`, and those that did not answer in time."""

    def refuse_values(self, apart: list[int]) -> None:
        """Raise for parameters that differ."""

    def say_apart(self, apart: list[int]) -> None:
        """Warn of other tensors that differ."""

    def say_same(self, is_model: bool) -> None:
        """Warn of the same work in all ranks."""


class UpdatesByHand:
    """Watches the backwards of one task for parameters that change, rank by rank, without a step of torch's optimizers.

    ``p -= lr * p.grad`` is such an update; so are the optimizers of fastai and of Keras. All of them need a backward.
    So at the beginning of some backwards, the ranks compare a number for the values that the backward reaches and that
    nothing is known to synchronise, if these have changed since the last comparison. It ends with the first decision;
    then `torch.autograd.backward` is torch's own again.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._count = 0
        self._empty = 0
        self._before: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id: reached leaves, and their values
        self._original: Callable[..., Any] | None = None
        self._watched: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Begin a task; also called with `torch.autograd` when it is imported later."""
        self.end()
        autograd: Any = sys.modules.get("torch.autograd")
        if autograd is None:
            return
        self._count = self._empty = 0
        original = self._original = autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._watched is not None:
                self._count += 1
                if self._count in _LOOKS:
                    self._try_to_look(tensors)
            return original(tensors, *args, **kwargs)

        self._watched = autograd.backward = watched

    def end(self) -> None:
        """Stop watching."""
        autograd: Any = sys.modules.get("torch.autograd")
        if autograd is not None and self._watched is not None and autograd.backward is self._watched:
            autograd.backward = self._original  # else other code has wrapped it, and `watched` only passes calls on
        self._watched = self._original = None
        self._before.clear()

    def _try_to_look(self, tensors: Any) -> None:
        """Compare the values that this backward reaches.

        Raises:
            NotPrepared: By the judge. A type of tensor that cannot be compared is not the program's error.
        """
        try:
            self._look(tensors)
        except NotPrepared:
            raise
        except Exception:
            self.end()

    def _look(self, tensors: Any) -> None:
        settled = self._judge.settled()
        leaves = [leaf for leaf in _leaves(tensors) if id(leaf) not in settled and not self._is_kept(leaf)]
        self._empty += not leaves
        if self._empty == _MOST_EMPTY or self._count == max(_LOOKS):
            self.end()
            return
        values = [(leaf, fingerprint([leaf]) or 0) for leaf in leaves]
        known = [(leaf, value) for leaf, value in values if self._is_known(leaf)]
        has_changed = any(self._before[id(leaf)][1] != value for leaf, value in known)
        self._before |= {id(leaf): (weakref.ref(leaf), value) for leaf, value in values}
        if not has_changed:
            return
        found = number(repr([value for _, value in known]).encode())
        key = number(f"by hand {self._count}".encode()) ^ 1  # even, where numbers of optimizers' steps are odd
        apart, missing = self._judge.compare_values(key, found)
        self.end()
        is_model = any(isinstance(leaf, sys.modules["torch"].nn.Parameter) for leaf, _ in known)
        if apart and is_model:
            self._judge.refuse_values(apart)
        elif apart:
            self._judge.say_apart(apart)
        elif not missing and not self._judge.has_exchanged():
            self._judge.say_same(is_model=is_model)

    def _is_kept(self, leaf: Any) -> bool:
        return _is_sharded(leaf) or _is_freed(leaf) or self._judge.keeps(leaf)

    def _is_known(self, leaf: Any) -> bool:
        """Return whether a backward that was watched has reached the leaf before."""
        known = self._before.get(id(leaf))
        return known is not None and known[0]() is leaf


def _is_sharded(leaf: Any) -> bool:
    """Return whether the leaf is a rank's part: a DTensor, or what FSDP1 computes with in place of its parameters."""
    tensors, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
    return isinstance(leaf, (*((tensors.DTensor,) if tensors else ()), *((fsdp.FlatParameter,) if fsdp else ())))


def _is_freed(leaf: Any) -> bool:
    """Return whether the leaf has no memory now: FSDP gathers a parameter for the forward, and again in the backward.

    Reading its values would end the process.
    """
    return bool(has_plain_memory(leaf) and leaf.numel() and not leaf.untyped_storage().nbytes())


def _leaves(tensors: Any) -> Iterator[Any]:
    """Yield the tensors that get gradients by a backward from `tensors`."""
    roots = [tensors] if hasattr(tensors, "grad_fn") else list(tensors)
    nodes = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
