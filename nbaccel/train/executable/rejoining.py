"""Rejoining: a DDP module whose process group is over gets a reducer in the new one. Runs in ranks, by every rank.

It happens at the module's next forward, not at once: there the ranks come in the program's own order, however many
such modules there are. Nothing is added to the forward of any other module.
"""

from __future__ import annotations

import gc
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["rejoin_at_next_forward"]


def rejoin_at_next_forward(module: DistributedDataParallel) -> None:
    """Let `module` join the default group as it is at its next forward. Collective there.

    Rank 0's weights and buffers count then, and its optimizers' state: a rank may have taken a step more than the
    others before the group was lost.
    """
    if "forward" in vars(module):  # it is waiting already, or the program replaced its forward and knows why
        return

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        del module.forward  # the class's own is seen again
        # Every rank comes here once, at its first forward, so this is also sound within forward_backward, which
        # refuses collectives of a loss function because a rank may repeat that alone.
        with _disable_current_modes():
            _rejoin(module)
        return module.forward(*inputs, **kwargs)

    vars(module)["forward"] = forward


def _rejoin(module: DistributedDataParallel) -> None:
    if "reducer" in vars(module):  # else its gradients are lent, and it makes one when it gets them back
        _make_reducer(module)
    for tensor in [*module.module.parameters(), *module.module.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    for optimizer in _optimizers_of(module):
        states = [optimizer.state_dict()]
        dist.broadcast_object_list(states, 0)
        optimizer.load_state_dict(states[0])


def _make_reducer(module: DistributedDataParallel) -> None:
    """In the default group, in the way in which torch does it for a module that was pickled."""
    hooks = list(getattr(module, "_comm_hooks", ()))
    module.process_group = dist.group.WORLD  # type: ignore[assignment]  # it exists: the ranks have formed it again
    state = module.__getstate__()
    del module.reducer, module.logger
    module.__setstate__(state)
    for hook, hook_state in hooks:
        dist._register_comm_hook(module.reducer, hook_state, hook)


def _optimizers_of(module: DistributedDataParallel) -> list[Optimizer]:
    """torch's own optimizers of the module's parameters, in the order of the parameter that each begins with."""
    order = {id(parameter): number for number, parameter in enumerate(module.module.parameters())}
    found = [
        (min(numbers), type(thing).__name__, thing)
        for thing in gc.get_objects()
        if issubclass(type(thing), Optimizer) and thing.state
        if (numbers := [order[id(p)] for group in thing.param_groups for p in group["params"] if id(p) in order])
    ]
    return [optimizer for *_, optimizer in sorted(found, key=lambda row: row[:2])]
