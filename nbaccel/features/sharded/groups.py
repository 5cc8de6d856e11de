"""Choose the groups of modules whose parameters FSDP gathers and frees together. Runs in ranks; shards nothing.

A group is one all-gather in the forward, one in the backward, and one reduce-scatter. A rank holds its shards and,
for a moment, one whole group: so the groups decide how much memory sharding saves. `choose_groups` reads modules and
changes none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList, Parameter

from nbaccel.base.values import frozen
from nbaccel.train.step.recompute import members_of_lists

__all__ = ["BY_CLASS", "BY_SIZE", "GroupPolicy", "Groups", "choose_groups", "ignored"]

BY_CLASS = "transformer_based_wrap"
BY_SIZE = "size_based_wrap"
_NO_GROUPS = "no_wrap"


@frozen
class GroupPolicy:
    """The choice of blocks: the fields of `FullyShardedDataParallelPlugin` for it.

    Args:
        kind: "transformer_based_wrap", "size_based_wrap", "no_wrap", a function of a module, or None for what the model
            is.
        class_names: The class names of blocks, for the first rule.
        min_parameters: The least number of parameters of a block, for the second rule.
    """

    kind: str | Callable[..., bool] | None = None
    class_names: Sequence[str] = ()
    min_parameters: int = 0


@frozen
class Groups:
    """Modules to shard, in the order in which torch has to be told: inner groups first, the model itself last.

    Args:
        groups: Lists of modules, each sharded together.
        blocks: Those that were chosen by the policy.
    """

    groups: Sequence[Sequence[Module]]
    blocks: Sequence[Module]


def choose_groups(model: Module, policy: GroupPolicy, uniform_dtype: bool) -> Groups:
    """Return the groups of `model`.

    Modules that share a parameter (tied embeddings) go into one group wherever they are: sharded apart, the last rank's
    rows would silently never be trained in some versions of torch (pytorch#176076), and newer ones refuse them.

    Args:
        uniform_dtype: Trainable parameters of a group must have one dtype, since gradients are reduced in theirs.

    Raises:
        ValueError: No module has a class that the policy names, or one module mixes trainable dtypes.
    """
    blocks = [block for block in _blocks(model, policy) if block is not model]
    shared = list(_sharers(model, blocks))
    odd = list(_odd_dtypes(model, blocks)) if uniform_dtype else []
    inside = {id(module) for group in (*shared, *odd) for module in group}
    rest = [[block] for block in blocks if id(block) not in inside]
    generators = [[part] for part in _bottom_up(model) if part not in (model, *blocks) and _generates(part)]
    return Groups([*shared, *odd, *rest, *generators, [model]], blocks)


def _generates(module: Module) -> bool:
    """Return whether `module` is a model inside of another one that programs call by itself, as peft's generate does.

    The forward of the outer one, which gathers what no block has, does not run then.
    """
    return hasattr(type(module), "generate")  # not of the object: peft's layers answer for the model inside


# -- blocks


def _blocks(model: Module, policy: GroupPolicy) -> list[Module]:
    if policy.kind == _NO_GROUPS:
        return []
    if callable(policy.kind):
        return [module for module in _bottom_up(model) if _asks(policy.kind, module)]
    if policy.kind == BY_SIZE:
        return list(_by_size(model, policy.min_parameters))
    names = set(policy.class_names)
    if names:
        return _of_classes(model, names, "transformer_cls_names_to_wrap")
    if own := _names_of_its_own(model):
        return _of_classes(model, own, "_no_split_modules", must_exist=False) or list(_members(model))
    return list(_members(model))


def _of_classes(model: Module, names: Collection[str], said: str, must_exist: bool = True) -> list[Module]:
    found = [module for module in _bottom_up(model) if type(module).__name__ in names]
    missing = sorted(set(names) - {type(module).__name__ for module in found})
    if missing and must_exist:
        there = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"{said} names {', '.join(missing)}, and {type(model).__name__} has no module of that class. It has "
            f"{', '.join(there)}"
        )
    return found


def _names_of_its_own(model: Module) -> set[str]:
    """Return the classes that a model of transformers, wherever it is inside of `model`, wants to keep whole."""
    return {str(name) for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _members(model: Module) -> Iterator[Module]:
    """Yield the members of the outermost lists of `model`; of a list in a list those of the inner one."""
    for member in members_of_lists(model):
        if isinstance(member, ModuleList | ModuleDict):  # they have no forward around which to gather
            yield from (inner for child in member.children() for inner in ([child] if _holds(child) else []))
        else:
            yield member


def _by_size(model: Module, least: int) -> Iterator[Module]:
    """Yield modules bottom-up that have at least `least` parameters which no module below them has taken."""
    taken: set[int] = set()
    for module in _bottom_up(model):
        if isinstance(module, ModuleList | ModuleDict):
            continue
        own = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        if own and sum(own.values()) >= least:
            taken |= own.keys()
            yield module


def _asks(policy: Callable[..., bool], module: Module) -> bool:
    """Call a policy of either form: of a module, or with the arguments of FSDP1's, which may be partial."""
    if isinstance(module, ModuleList | ModuleDict) or not _holds(module):
        return False
    known = inspect.signature(policy).parameters
    own = sum(parameter.numel() for parameter in module.parameters())
    if "recurse" in known:
        return bool(policy(module=module, recurse=False, nonwrapped_numel=own))
    return bool(policy(module))


def _bottom_up(model: Module) -> Iterator[Module]:
    return reversed(list(model.modules()))


def _holds(module: Module) -> bool:
    return any(True for _ in module.parameters())


# -- parameters that several modules own


def _sharers(model: Module, blocks: Sequence[Module]) -> Iterator[list[Module]]:
    """Yield lists of blocks, and modules outside of them, that share parameters; without a block the root has them."""
    home = {id(module): block for block in reversed(blocks) for module in block.modules()}
    owners: dict[int, list[Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(home.get(id(module), module))
    joined: list[dict[int, Module]] = []
    for modules in owners.values():
        together = {id(module): module for module in modules}
        if len(together) < 2 or not any(module in blocks for module in modules):
            continue
        for group in [group for group in joined if group.keys() & together.keys()]:
            together |= group
            joined.remove(group)
        joined.append(together)
    yield from (list(group.values()) for group in joined)


# -- parameters of other types


def _odd_dtypes(model: Module, blocks: Sequence[Module]) -> Iterator[list[Module]]:
    """Yield modules whose trainable parameters have another dtype than most of their group, each as a group."""
    inside = {id(module) for block in blocks for module in block.modules()}
    rest = [module for module in model.modules() if id(module) not in inside]
    for group in (*([*block.modules()] for block in blocks), rest):
        counts: dict[torch.dtype, int] = {}
        for parameter in _own(group):
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
        if len(counts) < 2:
            continue
        usual = max(counts, key=lambda dtype: counts[dtype])
        for module in group:
            kinds = {parameter.dtype for parameter in _own([module])}
            if len(kinds) > 1:
                raise ValueError(
                    f"{type(module).__name__} in {type(model).__name__} trains parameters of several types "
                    f"({', '.join(sorted(map(str, kinds)))}), and what is sharded together is reduced in one: give "
                    "them one type, model.float() for example, or choose mixed_precision, which keeps fp32 weights"
                )
            if kinds and usual not in kinds and not (blocks and module in blocks):
                yield [module]


def _own(modules: Iterable[Module]) -> Iterator[Parameter]:
    for module in modules:
        yield from (
            parameter
            for parameter in module._parameters.values()
            if parameter is not None and parameter.requires_grad and parameter.is_floating_point()
        )


def ignored(model: Module, chosen: Any) -> set[Parameter]:
    """Return the parameters of `chosen`: modules, or a regular expression over the names of modules.

    Raises:
        ValueError: One of them is trained, which each rank would do by itself.
    """
    if chosen is None:
        return set()
    modules = (
        [module for name, module in model.named_modules() if re.fullmatch(chosen, name)]
        if isinstance(chosen, str)
        else list(chosen)
    )
    parameters = {parameter for module in modules for parameter in module.parameters()}
    trained = [
        name for name, parameter in model.named_parameters() if parameter in parameters and parameter.requires_grad
    ]
    if trained:
        raise ValueError(
            f"ignored_modules holds parameters that are trained ({', '.join(trained[:3])}"
            f"{', …' if len(trained) > 3 else ''}): nobody would exchange their gradients, and each rank would train "
            "its own. Freeze them (requires_grad_(False)), or do not ignore them"
        )
    return parameters
