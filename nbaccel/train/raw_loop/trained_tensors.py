"""Models: the tensors that a program trains, with the same numbers in all ranks. Runs in ranks.

A leaf that a backward reaches for the first time is registered with all of the model that holds it: its parameters,
its buffers, and the optimizers' state for them. Rank 0's values are used from then on. No reference keeps a
registered tensor alive.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from nbaccel.base.values import attributes_of, frozen
from nbaccel.errors import NotPrepared
from nbaccel.train.distributed.callers import users_frames, variables_of
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.raw_loop.gradient_weights import as_floats
from nbaccel.train.raw_loop.graph import leaves_of

__all__ = [
    "KEEP_TOGETHER",
    "WITHOUT_A_SEED",
    "Item",
    "Model",
    "Models",
    "is_hook_of_ours",
    "optimizers_of",
    "parameters_of",
    "sums_of",
    "surrounding_optimizers",
    "surrounding_parameters",
]

KEEP_TOGETHER = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"})
"""Classes of models that average gradients themselves."""

_MOST_PARTS = 1000
_MOST_NAMES = 10_000
_MOST_FRAMES = 50
_MOST_LOOKED_AT = 50_000
_DEPTH = 5
_EMPTY = CellType()
_HOLD_NO_MODEL = frozenset({"builtins", "numpy", "IPython", "ipykernel", "tornado", "traitlets", "zmq"})
"""Packages whose objects are not looked into. The name `get_ipython` alone leads to thousands that serve the kernel,
each of them in a page that a forked rank would copy.
"""

_OFTEN_ALIKE = 4
"""Averages in a row that change nothing: every rank then writes the same, as for the average of a model's weights."""

_ROUNDING = 1e-6

WITHOUT_A_SEED = (
    "Where something draws without a seed, as a sampler of hyperparameters or default_rng(), give it one; --sweep runs "
    "configurations side by side, and with --independent each rank trains its own."
)


@dataclass(slots=True)
class Item:
    """One tensor that is equal in all ranks.

    Args:
        is_buffer: No backward reaches it.
        holder: Its layer, and its name there, to find what a forward has assigned to that name.
        is_sparse: Its gradient is, by its layer's `sparse`.
        norm: The layer whose statistics it is.
        kind: Its shape, dtype and device.
        version: When it was last averaged.
        sums: Checksums of its values when they were last read.
        is_written: They have changed without a new version, as by `.data`.
        alike: How often in a row they were equal to those of other ranks then.
    """

    tensor_of: weakref.ref[Tensor]
    is_buffer: bool = False
    holder: tuple[weakref.ref[Module], str] | None = None
    is_sparse: bool = False
    is_hooked: bool = False
    norm: weakref.ref[Module] | None = None
    kind: tuple[Any, ...] = ()
    version: int = 0
    sums: tuple[float, ...] = ()
    is_written: bool = False
    alike: int = 0

    @property
    def tensor(self) -> Tensor | None:
        known = self.tensor_of()
        if not self.is_buffer or (found := self.assigned()) is None:
            return known
        return found

    def assigned(self) -> Tensor | None:
        """Return the tensor that its layer now has under its name, if that is another one of the same kind."""
        if self.holder is None or (module := self.holder[0]()) is None:
            return None
        name = self.holder[1]
        found: Tensor | None = module._buffers.get(name, module._parameters.get(name))
        if found is None or found is self.tensor_of():
            return None
        return found if _kind(found) == self.kind else None

    @property
    def name(self) -> str:
        """The name of a tensor of a layer, as a person may find it."""
        module = None if self.holder is None else self.holder[0]()
        return "a buffer" if module is None or self.holder is None else f"{type(module).__name__}.{self.holder[1]}"

    @property
    def follows_batches(self) -> bool:
        """True if these are statistics that each forward of a normalisation changes."""
        norm = None if self.norm is None else self.norm()
        return norm is not None and norm.training

    def has_changed(self) -> bool:
        """Return whether a forward has written into this buffer. Normalisation does so without a new version."""
        tensor = self.tensor
        if tensor is None:
            return False
        if self.norm is not None and self.norm() is not None:
            return self.follows_batches
        if self.is_written:
            return self.alike < _OFTEN_ALIKE
        return tensor is not self.tensor_of() or tensor._version != self.version

    def note(self, tensor: Tensor, value: Tensor) -> None:
        """Set the tensor to `value`, that of all ranks."""
        if self.is_written:
            self.alike = self.alike + 1 if torch.allclose(tensor, value, rtol=_ROUNDING, atol=0, equal_nan=True) else 0
        tensor.data.copy_(value)
        if tensor is not self.tensor_of():
            self.tensor_of = weakref.ref(tensor)
        self.version = tensor._version


@frozen
class Model:
    """Tensors that were registered together.

    Args:
        name: The class, or "tensors".
        parameters: Numbers that are trained.
        device: Of the first tensor.
    """

    name: str
    parameters: int
    root_of: weakref.ref[Module] | None
    device: torch.device
    has_batch_norm: bool = False


class Models:
    """The known tensors of one rank.

    Args:
        on_leaf: Called with a leaf's number and the leaf whenever a backward has completed its gradient.
    """

    def __init__(self, on_leaf: Callable[[int, Tensor], None]) -> None:
        self.items: list[Item] = []
        self.models: list[Model] = []
        self._on_leaf = on_leaf
        self._number: dict[int, int] = {}
        self._met: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # leaves of no model: at which batch they came first
        self._given: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # to an optimizer: after how many batches
        self.reached: set[int] = set()  # numbers of parameters that have got a gradient, from this rank or another
        self._handles: list[Any] = []
        self._around: _Around | None = None
        self._is_searched = False  # in the present backward
        self._is_told = False  # what is put into modules

    def forget(self) -> None:
        """Begin a task: forget all tensors."""
        for handle in self._handles:
            handle.remove()
        self.__init__(self._on_leaf)  # type: ignore[misc]

    def number(self, tensor: Tensor) -> int | None:
        return self._number.get(id(tensor))

    def by_number(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """Return those of `tensors` that are known, by their numbers, in the numbers' order.

        A graph reaches leaves in an order that may depend on the number of its samples.
        """
        numbers = self._number
        found = {number: each for each in tensors if (number := numbers.get(id(each))) is not None}
        return dict(sorted(found.items()))

    def knows(self, tensors: Iterable[Tensor]) -> bool:
        return all(id(tensor) in self._number for tensor in tensors)

    def has_met(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether `tensors` are known, or will be when they return with another batch."""
        return all(id(tensor) in self._number or id(tensor) in self._met for tensor in tensors)

    def alive(self, kind: str = "all") -> Iterator[tuple[int, Tensor]]:
        """Yield the known tensors by number.

        Args:
            kind: "all", "parameters" or "buffers".
        """
        for number, item in enumerate(self.items):
            tensor = item.tensor
            if tensor is not None and (kind == "all" or item.is_buffer is (kind == "buffers")):
                yield number, tensor

    def is_training(self) -> bool:
        """Return whether one of the known models is in training mode; True where none is known."""
        roots = [root for model in self.models if model.root_of is not None and (root := model.root_of()) is not None]
        return not roots or any(root.training for root in roots)

    def batch_norms(self) -> list[str]:
        """Return the names of layers of the known models that compute with the statistics of a batch."""
        roots = [root for model in self.models if model.root_of is not None and (root := model.root_of()) is not None]
        return [
            name
            for root in roots
            for name, module in root.named_modules()
            if isinstance(module, _BatchNorm) and module.training
        ]

    def changed_buffers(self, reached: Collection[int]) -> list[int]:
        """Return the numbers of the buffers that a forward has changed.

        A parameter that a forward assigns again and no backward reaches, such as a codebook that follows its samples,
        is a buffer from then on.

        Args:
            reached: Numbers of the leaves that a backward is about to reach.
        """
        leaves = set(reached)
        changed = []
        for number, item in enumerate(self.items):
            if number in leaves:
                if item.is_written:
                    item.is_buffer = item.is_written = False
            elif not item.is_buffer:
                found = item.assigned()
                item.is_buffer = found is not None and id(found) not in self._number
            if item.is_buffer and item.has_changed():
                changed.append(number)
        return changed

    def look_at_values(self) -> None:
        """Find tensors that a forward has written without a new version; such a parameter is a buffer from then on.

        Frozen parameters are left out: there may be very many of them.
        """
        items = [
            (item, tensor)
            for number, tensor in self.alive()
            if (item := self.items[number]).norm is None
            and not item.is_written
            and (item.is_buffer or (tensor.requires_grad and number not in self.reached))
        ]
        for (item, _), sums in zip(items, _pairs(sums_of([tensor for _, tensor in items])), strict=True):
            if item.sums and item.sums != sums and not (item.is_buffer and item.has_changed()):
                item.is_buffer = item.is_written = True
            item.sums = sums

    def sort(
        self,
        leaves: Sequence[Tensor],
        batch: int,
        sizes: Collection[int],
        by_holders: bool = False,
        accumulates: bool = True,
    ) -> tuple[list[int], list[Tensor]]:
        """Return the numbers of those of `leaves` that are known, and those that must be registered.

        A parameter that an optimizer or a model holds is trained. Other leaves are trained once they are met with
        another batch than their first: a batch that itself requires a gradient never is, nor what is optimized for
        one batch alone, such as the latents of its samples, which an optimizer is given after the batch has come.
        Where no loader hands out batches, and a backward accumulates gradients of nothing else, those are trained that
        another backward has reached.

        Args:
            batch: How many batches were handed out.
            sizes: The sizes of the current batch on all ranks, where each has a part of it.
            by_holders: Look also for optimizers that hold plain tensors, for which another batch may be too late.
            accumulates: The backward adds gradients to the leaves.
        """
        self._is_searched = False
        known, new = [], []
        for leaf in leaves:
            number = self._number.get(id(leaf))
            if number is not None:
                known.append(number)
                if not self.items[number].is_hooked:
                    self._hook(number, leaf)
            else:
                new.append(leaf)
        given = {id(leaf): at for leaf in new if (at := self._given_at(leaf)) is not None}
        trained = {leaf for leaf, at in given.items() if at < batch}
        if any(by_holders or isinstance(leaf, Parameter) for leaf in new):
            around = self._surroundings([leaf for leaf in new if by_holders or isinstance(leaf, Parameter)])
            with_batch = {id(leaf) for leaf in new if leaf.ndim and leaf.shape[0] in sizes} & given.keys() - trained
            trained |= {id(leaf) for leaf in new if around.roots_of(leaf)}
            trained |= {id(leaf) for leaf in new if around.is_of_optimizer(leaf)} - with_batch
        found = [leaf for leaf in new if id(leaf) in trained or self._comes_back(leaf, batch, sizes)]
        if accumulates and not (batch or known or found):
            found = [leaf for leaf in new if self._has_come(leaf)]
        for leaf in new:
            if not self._has_come(leaf):
                self._met[id(leaf)] = weakref.ref(leaf), batch
        return known, found

    def note_given(self, tensors: Iterable[Tensor], batch: int) -> None:
        """Record that an optimizer is given `tensors` to train, after `batch` batches were handed out."""
        self._around = None
        self._given.update((id(each), (weakref.ref(each), batch)) for each in tensors)

    def _given_at(self, leaf: Tensor) -> int | None:
        """Return after how many batches of this task an optimizer was given `leaf`; None if none was."""
        found = self._given.get(id(leaf))
        return found[1] if found is not None and found[0]() is leaf else None

    def is_of_batch(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether each of `tensors` was met with one batch and with no other, and is not known."""
        met = [self._met.get(id(each)) for each in tensors if id(each) not in self._number]
        is_met = [found is not None and found[0]() is each for found, each in zip(met, tensors, strict=False)]
        return 0 < len(tensors) == len(met) and all(is_met)

    def _comes_back(self, leaf: Tensor, batch: int, sizes: Collection[int]) -> bool:
        if not self._has_come(leaf):
            return bool(sizes) and (not leaf.ndim or leaf.shape[0] not in sizes)  # a weight of the program, met late
        return self._met[id(leaf)][1] != batch

    def _has_come(self, leaf: Tensor) -> bool:
        met = self._met.get(id(leaf))
        return met is not None and met[0]() is leaf

    def are_kept_together(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether the program itself has prepared some of `leaves`: DDP, FSDP, DeepSpeed, sharded tensors."""
        if any(type(leaf).__name__ == "DTensor" or _is_freed(leaf) for leaf in leaves):
            return True
        ids = {id(leaf) for leaf in leaves}
        return any(
            not KEEP_TOGETHER.isdisjoint(kind.__name__ for kind in type(module).__mro__)
            and any(id(parameter) in ids for parameter in module.parameters())
            for leaf in leaves
            for root in self._surroundings(leaves).roots_of(leaf)
            for module in root.modules()
        )

    def _surroundings(self, leaves: Sequence[Tensor] | None = None) -> _Around:
        """Return the models and optimizers here.

        They are searched at most once for each backward with new leaves; not where a model or an optimizer was known to
        hold all of `leaves`, and none was put together since. Otherwise many models would be searched once for each.
        """
        around = self._around
        is_known = around is not None and leaves is not None and all(map(around.holds, leaves))
        if around is None or not (self._is_searched or is_known):
            if not self._is_told:
                self._is_told = True
                self._handles.append(register_module_module_registration_hook(self._note_registration))
                self._handles.append(register_module_parameter_registration_hook(self._note_registration))
            around = self._around = _Around()
            self._is_searched = True
        return around

    def _note_registration(self, *_: Any) -> None:
        """Note that something was put into a module, as where a program makes or wraps a model."""
        self._around = None

    def register(self, new: Sequence[Tensor], collectives: Collectives) -> bool:
        """Number `new`, and related tensors, equally in all ranks. Collective: all ranks, also those without new ones.

        Return whether this rank had rank 0's values before.

        Raises:
            NotPrepared: Ranks began to train different models in the same backward.
        """
        found = self._families(new)
        specs = collectives.gather_objects([[family.spec for family in found]])
        most = max(specs, key=len)
        if any(spec != most for spec in specs):
            others = {family.spec: family for family in found or self._families(None)}
            found = [others[spec] for spec in most if spec in others]
            are_others = len(set(most)) < len(most) or any({*spec} not in ({*most}, set()) for spec in specs)
            if any(collectives.gather_objects([len(found) != len(most) or are_others])):
                raise NotPrepared(
                    "the ranks began to train different parameters in the same backward, so they cannot be averaged. "
                    f"{WITHOUT_A_SEED} Otherwise build the same model in every rank."
                )
        tensors = [tensor for family in found for tensor in family.tensors]
        about = [each for family in found for each in family.about]
        facts = torch.tensor(
            [*sums_of(tensors), *(each.follows_batches for each in about)], dtype=torch.float64, device="cpu"
        )
        rows = collectives.tell("loss.backward()", facts)
        sums, follow = rows.split([2 * len(about), len(about)], dim=1)
        own = ~follow.bool().all(0)  # the others are averaged, and differ where the first batch was split
        compared = sums.unflatten(1, (-1, 2))[:, own]
        if bool((compared != compared[0]).any()):
            with torch.no_grad():
                for tensor in tensors:
                    tensor.data.copy_(collectives.broadcast(tensor.detach(), 0))
                _share_states(tensors, self._surroundings().optimizers, collectives)
        for each, pair in zip(about, _pairs(sums[0].tolist()), strict=True):
            each.sums = pair
        for family in found:
            self._add(family)
        return bool(torch.equal(facts[: 2 * len(about)].unflatten(0, (-1, 2))[own], compared[0]))

    def made_since(self) -> list[Tensor]:
        """Return what known models hold and no backward has reached, such as a layer that was just put into one."""
        roots = [root for model in self.models if model.root_of is not None and (root := model.root_of()) is not None]
        return [tensor for root in roots for tensor, _ in _tensors(root) if id(tensor) not in self._number]

    def _add(self, family: _Family) -> None:
        root = family.root
        for tensor, about in zip(family.tensors, family.about, strict=True):
            number = len(self.items)
            key = id(tensor)

            def forget(_: object, key: int = key, number: int = number) -> None:
                if self._number.get(key) == number:
                    del self._number[key]

            about.tensor_of = weakref.ref(tensor, forget)
            about.version = tensor._version
            self._number[key] = number
            self.items.append(about)
            if not about.is_buffer:
                self._hook(number, tensor)
        self.models.append(
            Model(
                type(root).__name__ if root is not None else "tensors",
                sum(t.numel() for t, about in zip(family.tensors, family.about, strict=True) if not about.is_buffer),
                None if root is None else weakref.ref(root),
                family.tensors[0].device,
                any(about.norm is not None for about in family.about),
            )
        )

    def _hook(self, number: int, tensor: Tensor) -> None:
        if tensor.requires_grad:  # otherwise it is frozen, and hooked when a backward reaches it
            self.items[number].is_hooked = True
            self._handles.append(tensor.register_post_accumulate_grad_hook(_LeafHook(self._on_leaf, number)))

    def trained_by_optimizers(self) -> list[Tensor]:
        """Return tensors of optimizers that are not known yet: a backward inside of a backward may reach them."""
        return [
            parameter
            for optimizer in self._surroundings().optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in self._number
        ]

    def _families(self, new: Sequence[Tensor] | None) -> list[_Family]:
        """Return the models that hold `new`, whole, and what no model holds; for None all models not known yet."""
        families: list[_Family] = []
        taken: set[int] = set(self._number)
        wanted = None if new is None else {id(leaf) for leaf in new}
        around = self._surroundings(new)
        held = [] if new is None else [root for leaf in new for root in around.roots_of(leaf)]
        roots = around.roots() if new is None else list({id(root): root for root in held}.values())
        for root in sorted(roots, key=lambda root: -sum(1 for _ in root.parameters())):
            tensors = [*_tensors(root)]
            ids = {id(tensor) for tensor, _ in tensors} - taken
            if (ids & wanted) if wanted is not None else ids:
                families.append(_Family(root, [(t, about) for t, about in tensors if id(t) in ids]))
                taken |= ids
        if new is None:
            return families
        order = {id(leaf): place for place, leaf in enumerate(new)}
        families.sort(key=lambda family: min(order.get(id(t), len(order)) for t in family.tensors))
        alone = [leaf for leaf in new if id(leaf) not in taken]
        return families + [_Family(None, [(leaf, Item(_nowhere)) for leaf in alone])] * bool(alone)


def _is_freed(leaf: Tensor) -> bool:
    """Return whether the leaf has no memory now: FSDP gathers a parameter for the forward, and again in the backward.

    Its module does not hold it meanwhile.
    """
    is_plain = leaf.layout is torch.strided and leaf.device.type != "meta"
    return is_plain and bool(leaf.numel()) and not leaf.untyped_storage().nbytes()


class _LeafHook(functools.partial[None]):
    """A hook on a leaf, which reports it by its number."""


def is_hook_of_ours(hook: Any) -> bool:
    """Return whether a hook on a leaf's gradient reports it, and changes nothing."""
    return type(hook) is _LeafHook


class _Family:
    """Tensors that are registered together."""

    def __init__(self, root: Module | None, tensors: Sequence[tuple[Tensor, Item]]) -> None:
        self.root = root
        self.tensors = [tensor for tensor, _ in tensors]
        self.about = [about for _, about in tensors]
        self.spec = (
            type(root).__qualname__,
            *((tuple(tensor.shape), str(tensor.dtype), about.is_buffer) for tensor, about in tensors),
        )


class _Gone:
    """Placeholder for a tensor before it is referred to."""


_nowhere: Any = weakref.ref(_Gone())


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _tensors(root: Module) -> Iterator[tuple[Tensor, Item]]:
    """Yield each parameter and floating-point buffer of `root` once; lazy ones do not exist yet."""
    seen: set[int] = set()
    for module in root.modules():
        is_sparse = bool(getattr(module, "sparse", False))
        norm: weakref.ref[Module] | None = weakref.ref(module) if isinstance(module, _NormBase) else None
        for name, parameter in list(module._parameters.items()):  # some programs define their own `parameters()`
            if parameter is None or id(parameter) in seen or torch.nn.parameter.is_lazy(parameter):
                continue
            seen.add(id(parameter))
            holder = weakref.ref(module), name
            yield parameter, Item(_nowhere, is_sparse=is_sparse, holder=holder, kind=_kind(parameter))
        for name, buffer in list(module._buffers.items()):
            if buffer is None or id(buffer) in seen:
                continue
            if buffer.is_floating_point() and not torch.nn.parameter.is_lazy(buffer):
                seen.add(id(buffer))
                holder = weakref.ref(module), name
                yield buffer, Item(_nowhere, is_buffer=True, holder=holder, norm=norm, kind=_kind(buffer))
        for value in list(vars(module).values()):  # tensors that are no `Parameter`, and are stepped by hand
            for part in _parts(value):
                if type(part) is Tensor and part.requires_grad and part.is_leaf and id(part) not in seen:
                    seen.add(id(part))
                    yield part, Item(_nowhere)


class _Around:
    """The models and the optimizers in this process, as far as the program can reach them. Keeps none of them alive."""

    def __init__(self) -> None:
        self._modules: dict[int, Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._take(gc.get_objects())  # objects made here; those from before a fork are frozen, and not listed
        self._search()
        modules, optimizers = list(self._modules.values()), list(self._optimizers.values())
        self._all_modules, self._all_optimizers = [*map(weakref.ref, modules)], [*map(weakref.ref, optimizers)]
        self._of_models: dict[int, tuple[weakref.ref[Tensor], list[weakref.ref[Module]]]] = {}
        for root in _roots(modules):
            held = {id(tensor): tensor for module in root.modules() for tensor in _held_by(module)}
            for tensor in held.values():
                _, roots = self._of_models.setdefault(id(tensor), (weakref.ref(tensor), []))
                roots.append(weakref.ref(root))
        self._of_optimizers = {
            id(tensor): weakref.ref(tensor)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        self._modules.clear()
        self._optimizers.clear()

    @property
    def modules(self) -> list[Module]:
        return [each for ref in self._all_modules if (each := ref()) is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each for ref in self._all_optimizers if (each := ref()) is not None]

    def roots(self) -> list[Module]:
        """Return modules that no other module holds."""
        return _roots(self.modules)

    def roots_of(self, tensor: Tensor) -> list[Module]:
        """Return those in which `tensor` is."""
        ref, roots = self._of_models.get(id(tensor), (None, []))
        return [] if ref is None or ref() is not tensor else [each for root in roots if (each := root()) is not None]

    def is_of_optimizer(self, tensor: Tensor) -> bool:
        ref = self._of_optimizers.get(id(tensor))
        return ref is not None and ref() is tensor

    def holds(self, tensor: Tensor) -> bool:
        """Return whether models or optimizers hold `tensor`, and these models are all there."""
        ref, roots = self._of_models.get(id(tensor), (None, []))
        if ref is not None and ref() is tensor:
            return all(root() is not None for root in roots)
        return self.is_of_optimizer(tensor)

    def _take(self, objects: Sequence[Any]) -> None:
        kinds = set(map(type, objects))
        modules = {kind for kind in kinds if Module in kind.__mro__}
        optimizers = {kind for kind in kinds if torch.optim.Optimizer in kind.__mro__}
        for each in objects:
            kind = type(each)
            if kind in modules:
                if "_modules" in vars(each):  # otherwise its constructor has raised
                    self._modules[id(each)] = each
            elif kind in optimizers and "param_groups" in vars(each):
                self._optimizers[id(each)] = each

    def _search(self) -> None:
        """Search what the program's frames refer to; reading all objects from before a fork would copy their pages."""
        waiting: deque[tuple[Any, int]] = deque()
        for frame in users_frames(_MOST_FRAMES):
            waiting += [(names, 0) for names in (variables_of(frame), frame.f_globals)]
        seen: set[int] = set()
        while waiting and len(seen) < _MOST_LOOKED_AT:
            value, depth = waiting.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            kind = type(value)
            if Module in kind.__mro__ and "_modules" in vars(value):
                self._take(list(value.modules()))
            elif torch.optim.Optimizer in kind.__mro__:
                self._take([value])
            elif depth < _DEPTH:
                waiting += [(part, depth + 1) for part in _inside(value, kind)]


def _roots(modules: Sequence[Module]) -> list[Module]:
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in inner]


def _held_by(module: Module) -> Iterator[Tensor]:
    """Yield the tensors that a module itself holds."""
    yield from (each for each in module._parameters.values() if each is not None)
    for value in list(vars(module).values()):
        yield from _parts(value)


def surrounding_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers that the program can reach from where it is. Searches all of its objects."""
    return _Around().optimizers


def optimizers_of(roots: Sequence[Tensor]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the program can reach and that step a leaf of `roots`. Searches all of its objects."""
    leaves = {id(leaf) for leaf in leaves_of(roots)[0]}
    return [
        each
        for each in surrounding_optimizers()
        if any(id(parameter) in leaves for group in each.param_groups for parameter in group["params"])
    ]


def surrounding_parameters() -> list[Tensor]:
    """Return the parameters of models that the program can reach from where it is. Searches all of its objects."""
    parameters = (each for module in _Around().modules for each in module._parameters.values() if each is not None)
    return list({id(each): each for each in parameters}.values())


def _inside(value: Any, kind: type) -> list[Any]:
    """Return what a container or an object holds; nothing of large ones, and of those that cannot hold a model."""
    if kind in (list, tuple, set, frozenset):
        parts = list(value) if len(value) <= _MOST_PARTS else []
    elif issubclass(kind, dict):  # other mappings may read a file for each value, and fail: h5py, IPython's `db`
        parts = list(dict.values(value)) if dict.__len__(value) <= _MOST_NAMES else []
    elif kind is FunctionType:
        cells = value.__closure__ or ()
        parts = [cell.cell_contents for cell in cells if cell != _EMPTY]
    elif kind is MethodType:
        parts = [value.__self__]
    elif kind is functools.partial:
        parts = [value.func, *value.args, *value.keywords.values()]
    elif issubclass(kind, (Tensor, ModuleType, type)) or f"{kind.__module__}".partition(".")[0] in _HOLD_NO_MODEL:
        parts = []
    else:
        parts = list((attributes_of(value) or {}).values())[:_MOST_PARTS]
    return parts


def _parts(value: Any) -> list[Tensor]:
    """Return the tensors in an attribute of a module."""
    parts = value[:_MOST_PARTS] if type(value) in (list, tuple) else (value,)
    return [part for part in parts if issubclass(type(part), Tensor)]


def _share_states(
    tensors: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer], collectives: Collectives
) -> None:
    """Copy the state of rank 0's optimizers for `tensors` to all ranks."""
    ids = {id(tensor) for tensor in tensors}
    states = [
        [
            value
            for parameter, state in optimizer.state.items()
            if id(parameter) in ids
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        for optimizer in optimizers
    ]
    mine = [[tuple(value.shape) for value in values] for values in states if values]
    if all(other == mine for other in collectives.gather_objects([mine])):
        for values in states:
            for value in values:
                value.copy_(collectives.broadcast(value.detach(), 0))


def _pairs(numbers: Sequence[float]) -> list[tuple[float, ...]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def sums_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return two checksums for each tensor, which differ for other values; 0 for non-finite ones. Copies none."""
    found: list[Tensor | float] = []
    for tensor in tensors:
        values = tensor.detach()
        if values.device.type == "meta":
            found += [0.0, 0.0]
            continue
        values = torch.view_as_real(values) if values.is_complex() else values
        found.append(values.sum(dtype=torch.float64))
        is_float = values.is_floating_point()
        found.append(torch.linalg.vector_norm(values, dtype=torch.float64) if is_float else 0.0)
    return [each if math.isfinite(each) else 0.0 for each in as_floats(found)]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
