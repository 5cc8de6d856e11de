"""Make a sharded model whole again: the program's own classes with plain parameters. Runs in ranks.

torch has no way back from ``fully_shard``. The private names that this takes are in this module alone; a test names the
torch that lacks one.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module, Parameter

__all__ = ["make_whole"]


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
        part.__class__ = type(part).__mro__[part._orig_cls_mro_index]
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
                if getattr(hook, "__module__", "").startswith(__package__):  # ours, beside torch's
                    del hooks[key]
    return dict(whole.values())
