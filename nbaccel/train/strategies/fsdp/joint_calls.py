"""Operations on sharded parameters, as programs write them for whole ones: right, or refused. Runs in ranks.

torch does some of them in silence otherwise than a program means it: a number that is read is that of the rank's own
rows, weights that are drawn repeat from rank to rank, an assignment to ``weight.data`` or to some of its elements and a
hook on a gradient have no effect. `treat_as_whole` changes that. `evaluation_hook` lets ranks agree that an evaluation
begins, so that one of them alone does not take what its peers send for their next training step. Nothing here runs in a
training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.train.distributed.collectives import Collectives

__all__ = ["HOOK_IS_LOST", "evaluation_hook", "treat_as_whole"]

HOOK_IS_LOST = (
    "register_hook: the gradient of a sharded parameter is summed over the ranks outside of autograd, which would "
    "never call this hook. Change parameter.grad between backward and step, or, after prepare, use "
    "parameter.register_post_accumulate_grad_hook; strategy='ddp' calls hooks"
)


def treat_as_whole() -> None:
    """Let operations on sharded tensors do in all ranks together what they do to a whole tensor; from now on.

    A norm, sum or maximum of sharded parameters is a tensor that still has to be summed over the ranks. torch reads
    such a tensor without the sum: ``weight.norm().item()`` would be the norm of the rank's own rows, another number on
    each rank. A parameter of one element lies on one rank, and reading it on another one fails.

    torch has no public way to replace what it does for these operators; its own table of exceptions is private.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_number
    for operator in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default):
        handlers[operator] = _draw_whole
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment]
    DTensor.__setitem__ = _set_item  # type: ignore[method-assign]
    DTensor.register_hook = _register_hook  # type: ignore[method-assign]


def _whole_number(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the number that the one element of a sharded tensor is. Collective unless every rank has it whole."""
    whole: Tensor = inputs[0].detach().full_tensor()
    return whole.item()


def _draw_whole(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Fill a sharded tensor with its rows of random numbers that are drawn for the whole one, as one process would.

    Ranks with equal seeds that draw for their own rows alone would fill them with equal rows.
    """
    tensor, *rest = inputs
    rows = tensor.detach().to_local()
    whole = torch.empty(tensor.shape, dtype=rows.dtype, device=rows.device)
    rows.copy_(_rows_like(tensor, operator(whole, *rest, **options)))
    return tensor


def _rows_like(tensor: Any, values: Tensor) -> Tensor:
    """Return this rank's rows of `values`, whole or sharded, as `tensor` is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(values, DTensor):
        values = values.redistribute(placements=tensor.placements)
    else:
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None)
    rows: Tensor = values.to_local()
    return rows


def _data(tensor: Any) -> Any:
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def _set_data(tensor: Any, values: Tensor) -> None:
    """Write `values` into the rows, which the model gathers from. torch would change an object that nobody reads.

    Raises:
        ValueError: `values` have another shape or type.
    """
    if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise ValueError(
            f"tensor.data = … gives a sharded tensor of shape {tuple(tensor.shape)} and {tensor.dtype} values of shape "
            f"{tuple(values.shape)} and {values.dtype}: rows cannot change their shape or type after prepare; do that "
            "before"
        )
    tensor.detach().to_local().copy_(_rows_like(tensor, values.detach()))


def _set_item(tensor: Any, index: Any, value: Any) -> None:
    """Assign `value` to the elements that `index` chooses in the whole tensor. Collective.

    torch would assign to a copy of the elements where they are chosen along the rows.

    Raises:
        RuntimeError: it is a parameter, and gradients are recorded.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("elements of a sharded parameter are assigned to: do that under torch.no_grad()")
    whole = _whole(tensor)
    whole[tuple(map(_whole, index)) if isinstance(index, tuple) else _whole(index)] = _whole(value)
    tensor.detach().to_local().copy_(_rows_like(tensor, whole))


def _whole(value: Any) -> Any:
    """Return the whole tensor that `value` holds rows of, or `value` if it is none."""
    return value.detach().full_tensor() if hasattr(value, "full_tensor") else value


def _register_hook(tensor: Any, hook: Callable[[Tensor], Any]) -> Any:
    """Register `hook` as torch does, but on a parameter, whose gradient does not come by autograd.

    Raises:
        NotImplementedError: it is a parameter.
    """
    if isinstance(tensor, torch.nn.Parameter):
        raise NotImplementedError(HOOK_IS_LOST)
    return Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]


def evaluation_hook(
    model: Module, collectives: Collectives, statistics: Sequence[Tensor]
) -> Callable[[Module, Any], None]:
    """Return a hook for before each forward of `model`; the first one in evaluation mode after others is collective.

    There the ranks agree that they evaluate. A rank that evaluates alone would exchange its rows of the evaluation with
    the rows of its peers' next training step, until a call meets one of another kind. With this, it waits at once, in
    another process group than the one in which they wait. Then rank 0 sends its running `statistics`, as DDP would.
    """
    call = f"the first evaluation of {type(model).__name__} after its training"
    was_training: bool | None = None

    def begin_evaluation(model: Module, inputs: Any) -> None:
        nonlocal was_training
        if model.training:
            was_training = True
        elif was_training is not False:
            if not torch.compiler.is_compiling():
                collectives.agree(call)
            if was_training:
                _send(statistics)
            was_training = False

    return begin_evaluation


def _send(statistics: Sequence[Tensor]) -> None:
    """Give every rank the `statistics` of rank 0, those of a type in one message. Collective."""
    from torch.distributed import broadcast

    for dtype in sorted({buffer.dtype for buffer in statistics}, key=str):
        alike = [buffer for buffer in statistics if buffer.dtype == dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in alike])
        broadcast(flat, 0)
        parts = flat.split([buffer.numel() for buffer in alike])
        torch._foreach_copy_(alike, [part.view_as(one) for part, one in zip(parts, alike, strict=True)])
