"""Run a training step with tensors that have shapes and no memory, and record what it would hold. Runs anywhere.

The model is copied onto fake tensors of torch: the program's own model, its hooks, its gradients and its random numbers
are not touched, and no device is used. What a kernel needs inside of one operation is not seen, and a program that
looks into its tensors (``.item()``, an ``if`` on a value) cannot run: `CannotFake` says what it was.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_unflatten

from nbaccel.features.batch_size.step_memory import Moment, StepSchedule, Weight
from nbaccel.features.sharded.groups import GroupPolicy, Groups, choose_groups
from nbaccel.train.distributed.nested import is_container, leaves, map_children
from nbaccel.train.oom.memory.mem_limit import MemLimit
from nbaccel.train.step.precision import make_precision
from nbaccel.train.strategies.single import is_sharded

__all__ = ["ByteCount", "CannotFake", "FakeModel"]

_ATTENTION = "scaled_dot_product"
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HOOKS = tuple(name for name in vars(Module()) if name.endswith("_hooks"))
_TOUCHED_BY = ("torch.distributed", "nbaccel.")
"""Modules whose hooks a copy does without: those of FSDP, and ours beside them."""


class CannotFake(Exception):
    """The step cannot run without values; the text is half a sentence."""


class ByteCount(MemLimit):
    """Counts the bytes that tensors without memory, of the meta device or fake, would have. Refuses nothing.

    Args:
        on_gpu: The output of attention counts twice. Kernels of a GPU keep it in their own order of dimensions for the
            backward, and the next layer keeps a copy in its order; that of the CPU makes one tensor for both.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if self._on_gpu and _ATTENTION in name and "backward" not in name:
            self._count_again(result[0].untyped_storage())
        return result

    def _admit(self, leaves: Iterable[Any]) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        for leaf in leaves:
            if isinstance(leaf, Tensor) and (isinstance(leaf, FakeTensor) or leaf.is_meta):
                self._count(leaf.untyped_storage())


class FakeModel:
    """A copy of `model` on fake tensors, as `mixed_precision` and FSDP's groups would have it.

    Args:
        model: A bare module; its tensors may be anywhere, also on the meta device or in shards.
        policy: The rule by which FSDP forms groups.
        on_gpu: The step is one on a GPU.

    Raises:
        ValueError: A parameter has no shape yet.
    """

    def __init__(
        self, model: Module, mixed_precision: str = "no", policy: GroupPolicy | None = None, on_gpu: bool = False
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.on_gpu = on_gpu
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._precision = mixed_precision
        self.model, self.copies = _copied(model, self._mode)
        self.groups: Groups = choose_groups(self.model, policy or GroupPolicy(), mixed_precision == "no")
        self.group_of: dict[int, int] = {}
        for number, modules in enumerate(self.groups.groups):
            for parameter in (parameter for module in modules for parameter in module.parameters()):
                self.group_of.setdefault(id(parameter), number)
        self._half_groups = {
            number
            for number, modules in enumerate(self.groups.groups)
            if not any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())
        }
        self.weights = tuple(map(self._weight, self.model.parameters()))
        self.buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        self.root = len(self.groups.groups) - 1
        if mixed_precision != "no":
            make_precision(mixed_precision, torch.device("cpu")).wrap_forward(self.model)

    def _weight(self, parameter: Parameter) -> Weight:
        group, half = self.group_of[id(parameter)], _HALF.get(self._precision)
        item = parameter.element_size()
        if half is None or not parameter.is_floating_point():
            return Weight(tuple(parameter.shape), parameter.requires_grad, group, item, item, item)
        kept = max(item, 4) if parameter.requires_grad else item
        gathered = 2 if group in self._half_groups else kept
        return Weight(tuple(parameter.shape), parameter.requires_grad, group, kept, gathered, 4)

    def schedule(self, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None, is_sharded: bool) -> StepSchedule:
        """Return what forward and backward of `batch` hold.

        Args:
            loss_fn: ``loss_fn(model, batch)``; None for the model's own loss, or one like a cross entropy.
            is_sharded: Compute with the weights that FSDP gathers, in half precision where there is a mixed precision.

        Raises:
            CannotFake: The program needs values.
        """
        half = _HALF.get(self._precision) if is_sharded else None
        before = [parameter.dtype for parameter in self.model.parameters()]
        if half is not None:
            for parameter in self.model.parameters():
                if self.group_of[id(parameter)] in self._half_groups and parameter.is_floating_point():
                    _retype(parameter, half, self._mode)
        try:
            return _Recording(self, self._mode).run(batch, loss_fn or own_loss)
        finally:
            for parameter, dtype in zip(self.model.parameters(), before, strict=True):
                if parameter.dtype != dtype:
                    _retype(parameter, dtype, self._mode)
                parameter.grad = None


class _Recording:
    """One step of a `FakeModel`, and the moments that hooks of its groups note."""

    def __init__(self, fake: FakeModel, mode: Any) -> None:
        self._fake, self._mode = fake, mode
        self._count = ByteCount(fake.on_gpu)
        self._moments: list[tuple[str, int, int]] = []
        self._peaks: list[int] = []
        self._gradients: dict[int, int] = {}
        self._base = 0
        self._is_backward = False

    def run(self, batch: Any, loss_fn: Callable[[Any, Any], Tensor]) -> StepSchedule:
        fake = self._fake
        root = fake.root
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(self._mode)
            stack.enter_context(self._count)
            self._count.count(fake.model)
            self._base = self._count.live_bytes
            stack.callback(self._hook())
            self._count.reset_peak()
            try:
                faked = _faked(batch, self._mode)
                batch_bytes = self._count.live_bytes - self._base
                loss = loss_fn(fake.model, faked)
                self._note("loss", root)
                self._is_backward = True
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    raise CannotFake(f"the loss is {_named(loss)}, through which no gradient goes")
                loss.backward()
            except CannotFake:
                raise
            except Exception as error:
                raise CannotFake(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}") from error
            del loss
            self._note("end", root)
        moments = (
            Moment(kind, group, nbytes, peak)
            for (kind, group, nbytes), peak in zip(self._moments, self._peaks[1:], strict=False)
        )
        return StepSchedule(
            (Moment("begin", root, 0, self._peaks[0]), *moments), fake.weights, root, fake.buffers, batch_bytes
        )

    def _note(self, kind: str, group: int, nbytes: int = 0) -> None:
        self._peaks.append(self._count.peak_bytes - self._base - sum(self._gradients.values()))
        self._moments.append((kind, group, nbytes))
        self._count.reset_peak()

    # -- hooks

    def _hook(self) -> Callable[[], None]:
        handles: list[Any] = []
        for number, modules in enumerate(self._fake.groups.groups):
            for module in modules:
                handles.append(module.register_forward_pre_hook(self._before(number), with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._after(number, module is modules[-1])))
        for parameter in self._fake.model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._complete))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _before(self, group: int) -> Callable[..., Any]:
        def gather(module: Module, args: Any, kwargs: Any) -> Any:
            if self._is_backward:  # computed again
                return None
            self._note("gather", group)
            values, tree = tree_flatten((args, kwargs))
            at = [index for index, leaf in enumerate(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if not at or not torch.is_grad_enabled():
                return None
            after: Any = _AfterBackward
            passed = after.apply(lambda: self._note("reduce", group), *(values[index] for index in at))
            for index, tensor in zip(at, passed, strict=True):
                values[index] = tensor
            return tree_unflatten(values, tree)

        return gather

    def _after(self, group: int, is_last: bool) -> Callable[..., None]:
        def free(module: Module, args: Any, output: Any) -> None:
            if self._is_backward:
                return
            outputs = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            copied = sum(leaf.nbytes for leaf in outputs if leaf._is_view())
            if is_last:
                self._note("free", group, copied)
            for leaf in outputs:
                leaf.register_hook(lambda _: self._begin_backward(group))

        return free

    def _begin_backward(self, group: int) -> None:
        self._note("backward", group)

    def _complete(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return
        storage = gradient.untyped_storage()
        size = 0 if storage._cdata in self._gradients else storage.nbytes()
        self._note("gradient", self._fake.group_of[id(parameter)], size)
        self._gradients[storage._cdata] = storage.nbytes()


class _AfterBackward(torch.autograd.Function):
    """Passes the inputs of a group on, and calls `note` when their gradients are complete, as FSDP does."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.note = note
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.note()
        return (None, *gradients)


# -- a step without a loss function


def own_loss(model: Any, batch: Any) -> Tensor:
    """Call `model` as most programs do, and return its own loss, or one that holds as much as a cross entropy.

    A mapping gives keyword arguments. Of a pair whose second entry is no input the first one is the input.
    """
    if isinstance(batch, Tensor):
        output = model(batch)
    elif hasattr(batch, "keys"):
        output = model(**{name: batch[name] for name in batch.keys()})  # noqa: SIM118  # no mapping, maybe
    elif isinstance(batch, (list, tuple)):
        output = model(*batch[: _inputs(model, len(batch))])
    else:
        raise CannotFake(f"a batch that is {_named(batch)} needs a loss_fn(model, batch)")
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    found = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise CannotFake("the model's output has no gradient")
    return -found[0].float().log_softmax(-1).mean() if found[0].dim() else found[0]


def _inputs(model: Any, count: int) -> int:
    """Return how many entries of a batch the forward takes: those without a default, at least one."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD]
    return max(1, min(count, len(needed)))


def _named(thing: Any) -> str:
    return f"a {type(thing).__name__}"


# -- copies


def _copied(model: Module, mode: Any) -> tuple[Any, dict[int, Parameter]]:
    """Return a copy of `model` with fake tensors, and its parameters by the id of the original.

    Modules are made first, empty, so that what refers to them in any way refers to the copies afterwards.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode

    modules = list(model.modules())
    memo: dict[int, Any] = {}
    parameters: dict[int, Parameter] = {}
    for module in modules:
        # FSDP puts two classes before the user's.
        kind: Any = type(module).__mro__[2] if is_sharded(module) else type(module)
        memo[id(module)] = kind.__new__(kind)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{name} of {type(model).__name__} has no shape before the first forward: run one batch through the "
                "model, then estimate"
            )
        memo[id(parameter)] = parameters[id(parameter)] = _fake_parameter(parameter, mode)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, mode)
    with FakeCopyMode(mode):
        for module in modules:
            vars(memo[id(module)]).update({name: _attribute(name, value, memo) for name, value in vars(module).items()})
    copied = memo[id(model)]
    forward = vars(copied).get("forward")
    if hasattr(forward, "casting"):  # autocast of a prepared model, for its device
        copied.forward = forward.forward
    copied.train()
    return copied, parameters


def _attribute(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name == "_compiled_call_impl":
        return None
    if name in _HOOKS and value:
        value = type(value)((key, hook) for key, hook in value.items() if not _is_of_strategy(hook))
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a generator: the step hardly changes it
        return value


def _is_of_strategy(hook: Any) -> bool:
    function = getattr(hook, "__wrapped__", hook)
    return str(getattr(function, "__module__", "")).startswith(_TOUCHED_BY)


def _fake_parameter(parameter: Parameter, mode: Any) -> Parameter:
    return Parameter(_fake(parameter, mode), requires_grad=parameter.requires_grad)


def _fake(tensor: Tensor, mode: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without memory like `tensor`, which may be sharded: then the whole of it."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


def _retype(parameter: Parameter, dtype: torch.dtype, mode: Any) -> None:
    parameter.grad = None
    parameter.data = _fake(parameter, mode, dtype)


def _faked(batch: Any, mode: Any) -> Any:
    if isinstance(batch, Tensor):
        return _fake(batch.detach(), mode).requires_grad_(batch.requires_grad)
    if hasattr(batch, "shape") and hasattr(batch, "__array__"):
        return _fake(torch.as_tensor(batch, device="cpu"), mode)
    return map_children(lambda child: _faked(child, mode), batch) if is_container(batch) else batch
