"""Interface of a way to distribute a model, and its default, a single device. Runs in ranks.

The functions at its end inspect modules; they run none.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbaccel.base.world import World
from nbaccel.features import feature
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.step.precision import Precision, Taken, make_precision

if TYPE_CHECKING:
    from nbaccel.features.micro_batches.lent_gradients import Gradients

__all__ = [
    "IGNORED",
    "INSTEAD",
    "Strategy",
    "gradients_of",
    "is_parallel",
    "is_sharded",
    "plain_name",
    "plainly_named",
    "waiting_names",
    "without_compile",
]

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute by which torch's DDP is told what it leaves out."""

_COMPILED = "_orig_mod"
"""The name under which ``torch.compile``'s wrapper has the module."""


class Strategy:
    """The way in which one model is trained by all ranks; this base class is one process with one device.

    Subclasses are final and override what their way needs. Every method runs in the ranks.

    Args:
        world: The position of this process.
        device: The device of this process.
        handlers: Options of torch's own classes, as the program gave them.
        plugin: Options of this strategy alone, as the program gave them; None for its defaults.
    """

    has_peers = False
    """True if gradients are exchanged with other ranks."""

    forwards_are_collective = False
    """True if no rank can run a forward by itself: all make trial steps, and repeat what did not fit, together."""

    recovers = False
    """True if this training continues after running out of memory: an optimizer's step is guarded then."""

    replicas: tuple[weakref.ref[Any], ...] = ()
    """Models of which a `Reduction` is known: whether somebody has averaged their gradients."""

    others: Any = None
    """The look at steps of optimizers that were not prepared, once it has begun: an `OtherOptimizers`."""

    distributed_type: ClassVar[str | None] = None
    """Accelerate's name of this way, where it is not that of replicas on devices of a kind: see `DistributedType`."""

    holds_gradients: ClassVar[bool] = True
    """True if a rank can keep gradients of its own and step with them."""

    leaves_only_parts: ClassVar[bool] = False
    """True if the program's models are of no use after a training unless `release` has made them whole."""

    plugin_class: ClassVar[type[Any] | None] = None
    """The class of its options, where it has any. They are the Accelerator's argument ``<name of the strategy>_plugin``
    and the attribute of that name of its state."""

    serves_one_process: ClassVar[bool] = False
    """True if a run of one process is trained by this way too, and not by that of a single device."""

    saves_together: ClassVar[bool] = False
    """True if reading or loading the state of a model or an optimizer is collective: all ranks have parts of it."""

    def __init__(
        self, world: World, device: torch.device, handlers: Handlers | None = None, plugin: Any = None
    ) -> None:
        self.world = world
        self.device = device
        self.handlers = handlers or Handlers()
        self.plugin = plugin

    def precision(self, name: str) -> Precision:
        """Return the precision in which this strategy computes. Called once, before `setup`.

        Args:
            name: "no", "fp16" or "bf16".
        """
        precision = make_precision(name, self.device, self.handlers)
        if name == "bf16" and self.device.type == "cuda" and self.world.is_main_process:
            _warn_if_emulated(self.device)
        return precision

    def expect(self, objects: Sequence[Any], window: int = 1, moves: int = 1) -> None:
        """Learn what one call of `prepare` holds, before `setup`: loaders and schedules may tell sizes.

        Args:
            objects: The program's objects, of any kind.
            window: Batches of a step.
            moves: How often schedules move in a step; 0 where the program moves them.
        """

    def place(self, model: Module) -> None:
        """Move a model to the device, as a whole.

        Args:
            model: The program's model.
        """
        model.to(self.device)

    def setup(self, models: Sequence[Module], optimizers: Sequence[Optimizer], moves: Sequence[bool]) -> list[Module]:
        """Return models that train as this strategy does, on the device. Collective.

        Args:
            models: The program's models of one call of `prepare`.
            optimizers: All that are prepared, of this call and of earlier ones; they follow their parameters. An
                optimizer may come before its model, or after it, in a call of its own without models.
            moves: For each model, whether it may be moved. Otherwise it stays on the devices where it is.
        """
        for model, move in zip(models, moves, strict=True):
            if move:
                self.place(model)
        return list(models)

    def keeps_together(self, model: Module) -> bool:
        """Return whether all ranks train `model` as one model, not each its own. Always true on a single device.

        Args:
            model: The program's model, or a prepared one.
        """
        return True

    def finds_parallel(self) -> bool:
        """Return whether this process holds a module, prepared or made by the user, that trains as one."""
        return True

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        """Return a block in which backward leaves the gradients of a model unsynchronised.

        Args:
            model: A prepared model.
        """
        return nullcontext()

    def within_window(self, model: Module) -> AbstractContextManager[Any]:
        """Return the block around a batch that does not end its accumulation window: `no_sync`, where that is best.

        Args:
            model: A prepared model.
        """
        return self.no_sync(model)

    def alone(self, model: Module) -> AbstractContextManager[Any]:
        """Return a block in which forward and backward of a model wait for no other rank, unless each rank enters it.

        Args:
            model: A prepared model.

        Raises:
            NotImplementedError: No trial step of `model` can be run and undone.
        """
        return nullcontext()

    def apart(self, models: Sequence[Module], collectives: Collectives) -> AbstractContextManager[Any]:
        """Return a block in which forwards of models wait for no other rank, however many each rank runs.

        Entering the block is collective. A forward that needs the other ranks all the same is one of their collectives.

        Args:
            models: Prepared models.
            collectives: The collectives of the ranks.
        """
        return nullcontext()

    def sync_in_backward(self, model: Module) -> AbstractContextManager[Any]:
        """Return a block in which backward synchronises the gradients of a model, also those of a forward under
        `no_sync`.

        Args:
            model: A prepared model.
        """
        return nullcontext()

    def await_backward(self, model: Module) -> None:
        """Make the next backward synchronise the gradients of a model, also those of a forward under `no_sync`.

        Args:
            model: A prepared model.
        """

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of a loss. Collective where gradients synchronise in it.

        Args:
            loss: A tensor of one element.
            **kwargs: Arguments of ``loss.backward``.
        """
        loss.backward(**kwargs)

    def trust(self, replica: Any) -> None:
        """Record that gradients of one of `replicas` that were in doubt are equal in all ranks.

        Args:
            replica: The one of `replicas`.
        """

    def explain_unfinished(self, replica: Any) -> str:
        """Return why the last reduction of one of `replicas` is not complete; empty if there was none to complete.

        Args:
            replica: The one of `replicas`.
        """
        return ""

    def lend_gradients(self, models: Sequence[Module], collectives: Collectives) -> Gradients:
        """Return the gradients of models, for `forward_backward` to accumulate and exchange. Collective.

        This strategy has them again as soon as the program runs a forward of its own.

        Args:
            models: Prepared models.
            collectives: The collectives of the ranks.

        Raises:
            CannotSplit: A model exchanges something in its forward, or its gradients are not ours to lend.
        """
        gradients: Gradients = feature("gradients for forward_backward")([self.unwrap(model) for model in models])
        return gradients

    def step(self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> tuple[Any, Taken]:
        """Step an optimizer.

        Args:
            optimizer: The program's own optimizer.
            precision: Says whether the gradients can be used, and unscales them.
            closure: Computes the loss again; None for most optimizers.

        Returns:
            What the optimizer returned, and whether it took the step.
        """
        return precision.step(optimizer, closure)

    def has_finite_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether all synchronised gradients of an optimizer are finite; equal on all ranks. Waits for the
        device.

        Args:
            optimizer: The program's own optimizer.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # The largest magnitude: unlike a sum it cannot overflow by itself, and NaN wins against every number.
        return bool(self.norm(parameters, float("inf")).isfinite())

    def abandon(self, models: Sequence[Module]) -> None:
        """Drop what a forward or a backward that did not end has left in models. No collective.

        Args:
            models: Prepared models.
        """

    def rejoin(self, models: Sequence[Module]) -> None:
        """Let models communicate in the process group that was formed again. Collective.

        Args:
            models: Prepared models.
        """

    def norm(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of all synchronised gradients of `parameters`: a plain 0-d tensor, equal on all ranks.

        Args:
            parameters: Parameters of prepared models.
            norm_type: The order p of the norm.
        """
        return torch.nn.utils.get_total_norm(gradients_of(parameters), norm_type)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients of `parameters` by their norm.

        Args:
            parameters: Parameters of prepared models.
            max_norm: The largest norm afterwards.
            norm_type: The order p of the norm.

        Returns:
            The norm before clipping, as `norm` returns it.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient value of `parameters`.

        Args:
            parameters: Parameters of prepared models.
            clip_value: Values are clipped to the range from -`clip_value` to `clip_value`.
        """
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def state_dict(self, model: Module) -> dict[str, Any]:
        """Return the state of the program's own module as this rank holds it: its rows, if it is sharded.

        With `saves_together` it is collective, and whole: on the host of rank 0, empty elsewhere.

        Args:
            model: A prepared model.
        """
        return self.unwrap(model).state_dict()

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the program's own optimizer, as `state_dict` does that of a model.

        Args:
            optimizer: The program's own optimizer.
        """
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state that `optimizer_state_dict` returned, on every rank.

        Args:
            optimizer: The program's own optimizer.
            state: The state.
        """
        optimizer.load_state_dict(state)

    def load_state_dict(self, model: Module, state: dict[str, Any], **options: Any) -> None:
        """Load a state that `state_dict` returned.

        Args:
            model: A prepared model.
            state: The state.
            **options: Arguments of the module's own ``load_state_dict``, such as ``strict``.
        """
        self.unwrap(model).load_state_dict(state, **options)

    def unwrap(self, model: Module) -> Module:
        """Return the program's own module.

        Args:
            model: A prepared model.
        """
        return without_compile(model)

    def free_gathered(self, models: Sequence[Module]) -> None:
        """Free parameters that a forward has gathered from other ranks; each rank keeps its rows. No collective.

        Args:
            models: Prepared models.
        """

    def forget(self) -> None:
        """Let go of the models and optimizers that were set up. Every rank calls it; no collective."""

    def release(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
        """Release everything of models and optimizers that cannot outlive the process group. Collective.

        Args:
            models: Prepared models.
            optimizers: Their optimizers.
        """


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that `parameters` have."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def without_compile(model: Module) -> Module:
    """Return the module inside ``torch.compile``'s wrapper, by the attribute in which torch keeps it."""
    while _COMPILED in model._modules:
        model = model._modules[_COMPILED]  # type: ignore[assignment]
    return model


def plain_name(name: str) -> str:
    """Return the name of a tensor in a model as it is without ``torch.compile``, of which any part may be compiled.

    Example:
        >>> plain_name("_orig_mod.body._orig_mod.0.weight")
        'body.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def plainly_named(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of a model with the names that it has without ``torch.compile``."""
    if not any(_COMPILED in name for name in state):
        return state
    plain: dict[str, Any] = OrderedDict((plain_name(name), value) for name, value in state.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        plain._metadata = OrderedDict(  # type: ignore[attr-defined]  # where torch keeps versions of modules
            (plain_name(name), value) for name, value in versions.items()
        )
    return plain


INSTEAD = (
    "For this model use accelerator.backward; if that does not fit into memory, find_executable_batch_size tries "
    "smaller batches on all ranks, and %%accelerate --oom shrink starts the cell again with smaller ones."
)


def is_parallel(model: Module) -> bool:
    """Return whether `model` synchronises its own gradients: DDP, or FSDP of either generation, ours or the user's."""
    module = without_compile(model)
    return isinstance(module, DistributedDataParallel) or is_sharded(module)


def waiting_names(model: Module) -> list[str]:
    """Return the parameters and buffers of `model`, under all names, that a device map has fetched for forwards alone.

    They are on the meta device between forwards. Empty for a model without a map: what is there has no numbers at all.
    """
    if not any("hf_device_map" in vars(part) or "_hf_hook" in vars(part) for part in model.modules()):
        return []
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, tensor in tensors if tensor.is_meta]


def is_sharded(module: Module) -> bool:
    """Return whether `module` is FSDP's, of either generation; by name, since importing them costs half a second."""
    return any(
        kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") and kind.__module__.startswith("torch.distributed")
        for kind in type(module).__mro__
    )


def _warn_if_emulated(device: torch.device) -> None:
    """Warn if bf16 is no format of `device`: torch computes in it there, in software, and says that it can."""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        gpu, has_fp16 = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device) >= (7, 0)
        instead = "mixed_precision='fp16', which it computes fastest" if has_fp16 else "mixed_precision='no'"
        warn_user(
            f"mixed_precision='bf16': {gpu} has no bf16 units, so torch emulates them, which is right but slow. "
            f"Write {instead}."
        )
