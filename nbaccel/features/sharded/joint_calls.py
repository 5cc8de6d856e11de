"""Operations on sharded parameters, as programs write them for whole ones: right, or refused. Runs in ranks.

torch does some of them in silence otherwise than a program means it: a number that is read is that of the rank's own
rows, weights that are drawn repeat from rank to rank, an assignment to ``weight.data`` or to some of its elements, a
write into ``weight[0]``, a hook on a gradient and other weights for one call have no effect. `treat_as_whole` changes
that. `evaluation_hook` lets ranks agree that an evaluation begins, so that one of them alone does not take what its
peers send for their next training step. Nothing here runs in a training step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.features.sharded.recovery import groups_of
from nbaccel.train.distributed.collectives import Collectives

__all__ = ["HOOK_IS_LOST", "evaluation_hook", "show_shards", "treat_as_whole"]

HOOK_IS_LOST = (
    "register_hook: the gradient of a sharded parameter is summed over the ranks outside of autograd, which would "
    "never call this hook. Change parameter.grad between backward and step, or, after prepare, use "
    "parameter.register_post_accumulate_grad_hook; strategy='ddp' calls hooks"
)

_DRAWN_IN = ["bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"]
_DRAWN_LIKE = ["rand_like", "randint_like", "randn_like"]
_DRAWN_FROM = ["bernoulli", "normal", "poisson"]
"""Operators of random numbers: drawn into a tensor, in the form of one, and with probabilities or means of one."""

_TAKE_PARTS = ["__getitem__", "chunk", "narrow", "select", "split"]
"""Methods that return parts of a tensor, which share its memory in one process."""

_CHANGE_NO_ELEMENT = frozenset({"detach_", "requires_grad_", "share_memory_"})

_grad = torch.autograd.grad
_functional_call = torch.nn.utils.stateless._functional_call


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
    handlers[torch.ops.aten.copy_.default] = _copy
    handlers.update(dict.fromkeys(_overloads(_DRAWN_IN), _draw_whole))
    handlers.update(dict.fromkeys(_overloads(_DRAWN_LIKE), _draw_like))
    handlers.update(dict.fromkeys(_overloads(_DRAWN_FROM), _draw_from))
    handlers.update(dict.fromkeys((torch.ops.aten.eye.out, torch.ops.aten.eye.m_out), _fill_whole))
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment]
    DTensor.__setitem__ = _set_item  # type: ignore[method-assign]
    DTensor.__format__ = _format  # type: ignore[method-assign]
    DTensor.register_hook = _register_hook  # type: ignore[method-assign]
    copied = _class_of_copies(DTensor)
    for name in _TAKE_PARTS:
        setattr(DTensor, name, _taking_parts(getattr(Tensor, name), copied))
    torch.autograd.grad = _refuse_grad
    torch.nn.utils.stateless._functional_call = _refuse_functional_call  # type: ignore[assignment]


def _overloads(names: Iterable[str]) -> Iterator[Any]:
    """Yield the operators of these names for all types of arguments, without those that write into ``out``."""
    for name in names:
        packet = getattr(torch.ops.aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads() if "out" not in overload)


def _whole_number(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the number that the one element of a sharded tensor is. Collective unless every rank has it whole."""
    whole: Tensor = inputs[0].detach().full_tensor()
    return whole.item()


def _format(tensor: Any, specification: str) -> str:
    """Format a tensor of one element as the number that it is, as torch does with a whole one. Collective then."""
    if specification and not tensor.dim():
        return format(tensor.item(), specification)
    return object.__format__(tensor, specification)


# -- random numbers: ranks with equal seeds that drew for their own rows alone would fill them with equal rows


def _draw_whole(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Fill a sharded tensor with its rows of random numbers that are drawn for the whole one, as one process would."""
    tensor, *rest = inputs
    whole = operator(_blank(tensor), *map(_whole, rest), **options)
    tensor.detach().to_local().copy_(_part_of(whole, tensor).to_local())
    return tensor


def _draw_like(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return a tensor, sharded like the first one, of random numbers that are drawn for the whole one."""
    tensor, *rest = inputs
    return _part_of(operator(_blank(tensor), *rest, **options), tensor)


def _draw_from(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return a sharded tensor that is drawn with sharded probabilities or means. Collective."""
    tensor = next(one for one in inputs if hasattr(one, "full_tensor"))
    return _part_of(operator(*map(_whole, inputs), **options), tensor)


def _fill_whole(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Fill the sharded tensor ``out`` with its rows of what the operator makes of a whole one."""
    tensor = options["out"]
    return _draw_whole(lambda whole: operator(*inputs, **{**options, "out": whole}), (tensor,), {})


def _blank(tensor: Any) -> Tensor:
    """Return a whole tensor without values, on the device of the rows."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _part_of(whole: Tensor, tensor: Any) -> Any:
    """Return `whole`, which this rank has made for itself, sharded as `tensor` is; no other rank is asked."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return distribute_tensor(whole, tensor.device_mesh, placements, src_data_rank=None)


# -- values that are written


def _copy(operator: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Copy sharded values into a tensor, or any values into a sharded one, as ``load_state_dict`` does.

    Collective, unless both are sharded alike: the values of a tensor that every rank has whole are rank 0's.
    """
    target, values, *rest = inputs
    if hasattr(target, "full_tensor"):
        target.detach().to_local().copy_(_rows_like(target, values.detach().expand(target.shape)))
        return target
    return operator(target, _whole(values), *rest, **options)


def _rows_like(tensor: Any, values: Tensor) -> Tensor:
    """Return this rank's rows of `values`, as `tensor` is sharded. Collective, unless they are sharded so already."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(values, DTensor):
        values = values.redistribute(placements=tensor.placements)
    else:
        values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
    rows: Tensor = values.to_local()
    return rows


def _data(tensor: Any) -> Any:
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def _set_data(tensor: Any, values: Tensor) -> None:
    """Write `values` into the rows, which the model gathers from. torch would change an object that nobody reads.

    Collective, unless they are sharded alike.

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
        RuntimeError: It is a parameter, and gradients are recorded.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("elements of a sharded parameter are assigned to: do that under torch.no_grad()")
    whole = _whole(tensor)
    whole[tuple(map(_whole, index)) if isinstance(index, tuple) else _whole(index)] = _whole(value)
    tensor.detach().to_local().copy_(_rows_like(tensor, whole))


def _whole(value: Any) -> Any:
    """Return the whole tensor that `value` holds rows of, or `value` if it is none."""
    return value.detach().full_tensor() if hasattr(value, "full_tensor") else value


def _class_of_copies(kind: Any) -> Any:
    """Return a class, derived from the sharded tensor's, of copies that a program may take for parts of a parameter.

    A part along the rows, like ``weight[0]``, is gathered, so that it is no view as in one process.
    """

    class CopyOfPart(kind):  # type: ignore[misc]
        """A part of a sharded tensor that does not share its memory: writes into it are refused."""

        __slots__ = ()
        # ``weight[0] += 1`` assigns what this returns to the elements of the weight
        __iadd__, __isub__ = Tensor.__add__, Tensor.__sub__
        __imul__, __itruediv__ = Tensor.__mul__, Tensor.__truediv__

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            is_write = name.endswith("_") and not name.endswith("__") and name not in _CHANGE_NO_ELEMENT
            written = args[0] if args else (kwargs or {}).get("tensor")  # what torch.nn.init names it
            if is_write and type(written) is cls:
                raise NotImplementedError(_write_is_lost(f"{name}()"))
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

        def __setitem__(self, index: Any, value: Any) -> None:
            raise NotImplementedError(_write_is_lost("[…] = …"))

    return CopyOfPart


def _write_is_lost(call: str) -> str:
    return (
        f"{call} of a part of a sharded tensor, as in weight[0].zero_(): a part along the rows is a copy, and the "
        "tensor would stay as it was. Assign to the elements under torch.no_grad(), on every rank: weight[0] = 0.0"
    )


def _taking_parts(method: Callable[..., Any], copied: Any) -> Callable[..., Any]:
    """Return `method`, which takes parts of a tensor, such that parts that are copies are of the class `copied`."""

    @functools.wraps(method)
    def take(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        taken: Any = method(tensor, *args, **kwargs)
        if not any(placement.is_shard() for placement in tensor.placements):
            return taken
        parts: Any = [taken] if isinstance(taken, Tensor) else taken
        for part in parts:
            if not any(placement.is_shard() for placement in part.placements):
                part.__class__ = copied
        return taken

    return take


# -- gradients, and a call with other weights


def _register_hook(tensor: Any, hook: Callable[[Tensor], Any]) -> Any:
    """Register `hook` as torch does, but on a parameter, whose gradient does not come by autograd.

    Raises:
        NotImplementedError: It is a parameter.
    """
    if isinstance(tensor, torch.nn.Parameter):
        raise NotImplementedError(HOOK_IS_LOST)
    return Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]


def _refuse_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.autograd.grad``, which does not reach a sharded parameter: autograd knows what was gathered of it.

    Raises:
        NotImplementedError: An input is a sharded parameter.
    """
    if not isinstance(inputs, Tensor | tuple | dict):
        inputs = list(inputs)
    asked = [inputs] if isinstance(inputs, Tensor) else inputs.values() if isinstance(inputs, dict) else inputs
    if any(isinstance(one, torch.nn.Parameter) and hasattr(one, "full_tensor") for one in asked):
        raise NotImplementedError(
            "torch.autograd.grad of sharded parameters: their gradients are summed over the ranks outside of autograd. "
            "Call accelerator.backward(loss), on every rank, and take parameter.grad, a gradient in shards"
        )
    return _grad(outputs, inputs, *args, **kwargs)


def _refuse_functional_call(module: Module, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call `module` with `values` in place of its parameters, unless it is sharded: it gathers what it has itself.

    Raises:
        NotImplementedError: A value is not the sharded parameter that it would replace.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "full_tensor") and values.get(name, parameter) is not parameter:
            raise NotImplementedError(
                f"functional_call with another {name}: {type(module).__name__} is sharded, and its forward gathers its "
                "own parameters, not those that are handed over. Write them into the parameters (parameter.data = …) "
                "for the call, or use strategy='ddp'"
            )
    return _functional_call(module, values, *args, **kwargs)


def show_shards(model: Module, frees: bool) -> None:
    """Let programs meet the shards of `model` where torch leaves gathered weights in their place, until a backward.

    Those are the parameters that no block of the model has, and all where gathered ones are kept after a forward.
    Between a forward and its backward, ``model.zero_grad()`` forgets the gradients of the shards too. After an
    evaluation, which no backward follows, the parameters of no block are freed: what a program writes into them by hand
    would be lost, and an optimizer that is made then would train them.

    Args:
        frees: False keeps what is gathered after an evaluation too, for further ones.
    """
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.zero_grad = _zero_grad  # type: ignore[attr-defined]
    if frees:
        model.register_forward_hook(_free_after_evaluation)


def _free_after_evaluation(model: Any, inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        model.reshard()


def _zero_grad(model: Any, set_to_none: bool = True) -> None:
    """Forget the gradients of `model`, those of shards too in whose place gathered weights are now."""
    from torch.distributed.fsdp import FSDPModule

    super(FSDPModule, model).zero_grad(set_to_none)
    for shard in (each.sharded_param for group in groups_of(model) for each in group.fsdp_params):
        if shard.grad is not None:
            shard.grad = None if set_to_none else shard.grad.detach().zero_()


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
