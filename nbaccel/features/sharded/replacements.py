"""Replace parameters of a model by shards or by whole ones, and keep optimizers on them. Runs in ranks.

`fully_shard` replaces each parameter of a module by a shard, a new object. An optimizer that was made before holds the
old ones, with its state under them. `Replacements` remembers which parameter became which, and brings optimizers over,
whenever they come: in the same call of `prepare`, in a later one, or in an earlier one. `make_whole` is the way back,
which torch does not have; it needs private names of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

__all__ = ["Replacements", "make_whole"]

_OURS = ("nbaccel.features.sharded.", "nbaccel.train.strategies.")
"""Beginning of the names of modules whose hooks a sharded model has."""


class Replacements:
    """Parameters that were replaced, and where in a model their successors are.

    Holds neither: an old one lives as long as an optimizer has it. A successor is found by its module and name, since
    torch moves no sharded parameter, in ``model.to(device)``, to which there is a weak reference.
    """

    def __init__(self) -> None:
        self._by_old: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Module], str]] = {}

    def add(self, model: Module, pairs: Mapping[Tensor, Tensor]) -> None:
        """Remember that each key was replaced by its value, a parameter of `model`."""
        self._by_old = {key: entry for key, entry in self._by_old.items() if entry[0]() is not None}
        places = {
            id(parameter): (owner, name) for owner in model.modules() for name, parameter in owner._parameters.items()
        }
        for old, new in pairs.items():
            if old is not new:
                owner, name = places[id(new)]
                self._by_old[id(old)] = (weakref.ref(old), weakref.ref(owner), name)

    def bring(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, which stays the same object with its groups and hooks, train the new parameters.

        State of a parameter's shape is sharded like it, each rank keeping its rows; the rest, step counters, stays.
        """
        for group in optimizer.param_groups:
            group["params"][:] = map(self._newest, group["params"])  # LBFGS keeps the list
        for old in list(optimizer.state):
            new = self._newest(old)
            if new is not old:
                entries = optimizer.state.pop(old)
                optimizer.state[new] = {name: _like(value, new) for name, value in entries.items()}

    def _newest(self, parameter: Tensor) -> Tensor:
        """Return what `parameter` has become, through all replacements."""
        old, owner, name = self._by_old.get(id(parameter), (None, None, ""))
        if old is None or owner is None or old() is not parameter or (module := owner()) is None:
            return parameter
        new = module._parameters.get(name)
        return parameter if new is None else new


def _like(value: Any, parameter: Tensor) -> Any:
    """Return state of an optimizer in the form of `parameter`: its rows of a whole tensor, or a whole one of rows."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def make_whole(model: Module) -> dict[Tensor, Tensor]:
    """Gather the parameters of `model`, whose modules become what they were; return the new one of each shard.

    The model is the same object, on its device, with tied parameters tied; DDP takes it, and so does another
    ``fully_shard``. Collective, and it needs the process group with which the model was sharded.
    """
    from torch.distributed._composable.contract import _get_registry
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.reshard()
    whole: dict[int, tuple[Tensor, Parameter]] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in whole:
                    values = parameter.full_tensor().detach()
                    whole[id(parameter)] = parameter, Parameter(values, parameter.requires_grad)
                owner._parameters[name] = whole[id(parameter)][1]
    for part in parts:
        state = part._get_fsdp_state()
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            if handle is not None:
                handle.remove()
        bases = type(part).__mro__
        part.__class__ = bases[bases.index(FSDPModule) + 1]
    for module in model.modules():
        registry = _get_registry(module)
        if registry is not None:
            registry.pop("fully_shard", None)
        _module_state_mapping.pop(module, None)
        for name in [name for name in vars(module) if str(name).startswith("__composable_api")]:
            del vars(module)[name]
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(name, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith(_OURS):  # ours, beside torch's
                    del hooks[key]
    return dict(whole.values())
