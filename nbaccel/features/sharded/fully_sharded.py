"""FullySharded: each rank holds its rows of every parameter, gradient and optimizer state (FSDP2, ZeRO). Runs in ranks.

torch's ``fully_shard`` does the work, in place: a model stays the program's own object. This module adds what programs
need beside it: optimizers made before `prepare`, tied parameters in several blocks, parameters of several types,
weights that differ between ranks, running statistics, windows of accumulation, norms that every rank can print.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from nbaccel.base.quantised import is_quantised_tensor
from nbaccel.base.world import World
from nbaccel.errors import CannotSplit
from nbaccel.features.sharded.fsdp_options import FullyShardedDataParallelPlugin
from nbaccel.features.sharded.groups import BY_CLASS, GroupPolicy, choose_groups, ignored
from nbaccel.features.sharded.joint_calls import HOOK_IS_LOST, evaluation_hook, show_shards, treat_as_whole
from nbaccel.features.sharded.recovery import abandon, move_to_groups, why_not
from nbaccel.features.sharded.replacements import Replacements, make_whole
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.collectives import Collectives, GroupCollectives
from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.step.precision import Precision
from nbaccel.train.step.recompute import recompute_activations
from nbaccel.train.strategies.norm_statistics import running_statistics
from nbaccel.train.strategies.replicated import living_modules
from nbaccel.train.strategies.single import (
    INSTEAD,
    Strategy,
    gradients_of,
    is_parallel,
    is_sharded,
    without_compile,
)

if TYPE_CHECKING:
    from nbaccel.features.micro_batches.lent_gradients import Gradients

__all__ = ["FullySharded"]

_STEPS, _READS = "nbaccel_steps", "nbaccel_reads"
"""Descriptions of the process groups in which sharded models communicate: in their forwards and backwards, and where
a program reads or writes parameters as whole ones."""


class FullySharded(Strategy):
    """FSDP2 over all ranks. Also understands models that the program has sharded itself.

    Every forward, evaluation included, gathers parameters from all ranks: all ranks have to call it.
    """

    has_peers = True
    forwards_are_collective = True
    distributed_type = "FSDP"
    plugin_class = FullyShardedDataParallelPlugin

    def __init__(
        self, world: World, device: torch.device, handlers: Handlers | None = None, plugin: Any = None
    ) -> None:
        super().__init__(world, device, handlers, plugin)
        self._replaced = Replacements()
        self._half: torch.dtype | None = None
        self._groups: list[Any] = []
        self._retired: list[Any] = []
        self._holding: weakref.WeakSet[Module] = weakref.WeakSet()  # those under no_sync; torch has no way to ask
        treat_as_whole()

    def precision(self, name: str) -> Precision:
        precision = super().precision(name)
        self._half = getattr(precision, "dtype", None)
        return precision

    # -- prepare

    def setup(self, models: Sequence[Module], optimizers: Sequence[Optimizer], moves: Sequence[bool]) -> list[Module]:
        for model in models:
            if not is_parallel(model):
                self._shard(without_compile(model))
        for optimizer in optimizers:
            self._replaced.bring(optimizer)
        return list(models)

    def _shard(self, model: Module) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        _refuse_quantised(model)
        if any(parameter._backward_hooks for parameter in model.parameters()):
            raise NotImplementedError(HOOK_IS_LOST)
        self._compare(model)
        replaced = dict(model.named_parameters(remove_duplicate=False))  # as the program's optimizers know them
        left_out = ignored(model, getattr(self.plugin, "ignored_modules", None))
        groups = choose_groups(model, self.group_policy, uniform_dtype=self._half is None)
        if self._half is not None:
            _raise_precision(model, self.world.is_main_process)
        if getattr(self.plugin, "activation_checkpointing", False):
            recompute_activations(model, groups.blocks or None)
        self._groups = [_group_of_all(_STEPS), _group_of_all(_READS)]
        mesh = DeviceMesh.from_group(self._groups[1], self.device.type)
        for modules in groups.groups:
            self._bring_from_main(modules, left_out)
            if model not in modules:
                for module in modules:
                    module.register_forward_hook(_not_a_view)
            before = {id(parameter): parameter for module in modules for parameter in module.parameters()}
            fully_shard(
                modules[0] if len(modules) == 1 else list(modules),
                mesh=mesh,
                ignored_params=left_out or None,
                **self._options(modules),
            )
            for parameter in before.values():
                if parameter not in left_out and not _is_shard(parameter):
                    parameter.data = parameter.data.new_empty(0)  # an optimizer may hold it: not the whole model too
        move_to_groups(model, self._groups[0], self._groups[1], only_mesh=mesh)
        evaluates = evaluation_hook(model, self._collectives, list(running_statistics([model])))
        model.register_forward_pre_hook(evaluates, prepend=True)
        show_shards(model, frees=getattr(self.plugin, "reshard_after_forward", True) is not False)
        assert isinstance(model, FSDPModule)
        kind: Any = type(model)  # torch's, for sharded models of this class
        if "no_sync" in vars(kind) or not hasattr(model, "no_sync"):
            kind.no_sync = lambda module: self.no_sync(module)  # as models of DDP and of FSDP1 have it
        now = dict(model.named_parameters(remove_duplicate=False))
        self._replaced.add(model, {old: now[name] for name, old in replaced.items()})

    @property
    def _collectives(self) -> Collectives:
        return GroupCollectives(self.world, self.device)

    @property
    def group_policy(self) -> GroupPolicy:
        """The choice of the modules that are gathered together."""
        plugin = self.plugin
        if plugin is None:
            return GroupPolicy()
        kind = plugin.auto_wrap_policy
        names = tuple(plugin.transformer_cls_names_to_wrap or ()) if kind in (None, "auto", BY_CLASS) else ()
        chosen = None if kind in (None, "auto", BY_CLASS) else kind
        return GroupPolicy(chosen, names, plugin.min_num_params or 0)

    def _options(self, modules: Sequence[Module]) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        options: dict[str, Any] = {}
        if self._half is not None:
            has_statistics = any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=None if has_statistics else self._half,  # they have fp32 statistics beside their weights
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # autocast does that, where an operator gains from it
            )
        if (chosen := getattr(self.plugin, "mixed_precision_policy", None)) is not None:
            options["mp_policy"] = chosen
        if getattr(self.plugin, "reshard_after_forward", True) is False:
            options["reshard_after_forward"] = False
        if getattr(self.plugin, "cpu_offload", False):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        return options

    def _compare(self, model: Module) -> None:
        """Refuse what would make ranks wait for each other for ever; that the models are alike is known. Collective.

        Raises:
            ValueError: Rank 0 has no weights, on every rank.
        """
        missing = next((name for name, parameter in model.named_parameters() if parameter.is_meta), "")
        if in_main := self._collectives.announce(f"prepare {type(model).__name__}, weights of rank 0", missing)[0]:
            raise ValueError(
                f"{in_main} of {type(model).__name__} is on the meta device in rank 0, whose weights all ranks get: "
                "load them there before prepare; the other ranks may have a model without weights"
            )

    def _bring_from_main(self, modules: Sequence[Module], left_out: set[Parameter]) -> None:
        """Give parameters and buffers of `modules`, not sharded yet, rank 0's values on the device. Collective."""
        from torch.distributed import broadcast

        known: dict[int, Parameter] = {}
        for owner in (part for module in modules for part in module.modules()):
            for name, parameter in owner._parameters.items():
                if parameter is None or _is_shard(parameter):
                    continue
                if id(parameter) not in known:
                    known[id(parameter)] = self._on_device(parameter)
                owner._parameters[name] = known[id(parameter)]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(self.device)
        buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
        for tensor in (*{id(new): new for new in known.values()}.values(), *buffers.values()):
            broadcast(tensor.detach(), 0)

    def _on_device(self, parameter: Parameter) -> Parameter:
        if parameter.is_meta:
            return Parameter(torch.empty_like(parameter, device=self.device), parameter.requires_grad)
        parameter.data = parameter.data.to(self.device).contiguous()
        return parameter

    def keeps_together(self, model: Module) -> bool:
        return is_parallel(model)

    def finds_parallel(self) -> bool:
        return any(is_parallel(module) for module in living_modules())

    # -- a step

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        if is_sharded(module):
            return _sync(module, False, self._holding)
        no_sync = getattr(module, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def within_window(self, model: Module) -> AbstractContextManager[Any]:
        # Gradients that are not reduced are whole ones: 2 P more on each rank, of weights that take P. Reduced in each
        # batch they add up in the shards, equally exactly.
        return nullcontext()

    def alone(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        if not hasattr(module, "reshard"):
            raise NotImplementedError(
                f"find_batch_size: {type(module).__name__} was not sharded by prepare, so its trial steps could not "
                "be undone: hand prepare the bare model. find_executable_batch_size tries sizes with any model"
            )
        return nullcontext()

    def sync_in_backward(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        return _sync(module, True, self._holding) if is_sharded(module) else nullcontext()

    def lend_gradients(self, models: Sequence[Module], collectives: Collectives) -> Gradients:
        if reason := why_not(plain := [*map(without_compile, models)], _STEPS):
            raise CannotSplit(
                "forward_backward repeats a batch that did not fit, on all ranks where a model is sharded (FSDP), and "
                f"{reason}. {INSTEAD}"
            )
        return super().lend_gradients(plain, collectives)

    def abandon(self, models: Sequence[Module]) -> None:
        for model in map(without_compile, models):
            abandon(model)

    def rejoin(self, models: Sequence[Module]) -> None:
        groups = [_group_of_all(_STEPS), _group_of_all(_READS)]
        for model in map(without_compile, models):
            move_to_groups(model, *groups)
        self._retired, self._groups = self._groups, groups  # gloo's threads may still drop the last tensors of the old

    def norm(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        from torch.distributed.tensor import DTensor

        gradients = gradients_of(parameters)
        sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        norms = [torch.nn.utils.get_total_norm(whole, norm_type)] if whole or not sharded else []
        if sharded:
            norms.append(_norm_of_rows(sharded, norm_type))
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        gradients = gradients_of(listed := list(parameters))
        total = self.norm(listed, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
        if gradients:
            torch._foreach_mul_([_rows(gradient) for gradient in gradients], factor)
        return total

    # -- states

    def free_gathered(self, models: Sequence[Module]) -> None:
        from torch.distributed.fsdp import FSDPModule

        for model in models:
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def release(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
        for model in map(without_compile, models):
            if is_sharded(model):
                self._replaced.add(model, make_whole(model))
        for optimizer in optimizers:
            self._replaced.bring(optimizer)


def _group_of_all(description: str) -> Any:
    """Return the process group of that description, one for all Accelerators. Collective where there is none yet.

    A forward that some ranks do not enter, or a parameter that one rank reads, would otherwise meet another collective
    of theirs: gloo ends the process then, and NCCL mixes up what was sent. In groups of their own they wait, and who
    watches the ranks can say where.
    """
    from torch.distributed import distributed_c10d, new_group

    known = (group for group in distributed_c10d._world.pg_map if getattr(group, "group_desc", "") == description)
    return next(known, None) or new_group(group_desc=description)


@contextmanager
def _sync(model: Module, synchronised: bool, holding: weakref.WeakSet[Module]) -> Iterator[None]:
    """Let backward reduce the gradients of `model`, or keep them whole and unreduced, while entered.

    Args:
        holding: Modules whose gradients are not reduced now.
    """

    from torch.distributed.fsdp import FSDPModule

    def set_sync(part: FSDPModule, reduces: bool) -> None:
        part.set_requires_gradient_sync(reduces, recurse=False)
        (holding.discard if reduces else holding.add)(part)  # type: ignore[arg-type]

    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    before = [part in holding for part in parts]
    for part in parts:
        set_sync(part, synchronised)
    try:
        yield
    finally:
        for part, was_held in zip(parts, before, strict=True):
            set_sync(part, not was_held)


def _not_a_view(module: Module, inputs: Any, output: Any) -> Any:
    """Return a copy of an output that is a view, as a linear layer's of three dimensions is.

    torch gathers the weights for the backward by a hook on the output. An operation in place on a view drops that hook
    in silence, and the gradients are wrong: ``nn.ReLU(inplace=True)`` behind such a layer, or ``x += y``.
    """
    return output.clone() if isinstance(output, Tensor) and output.requires_grad and output._is_view() else None


def _refuse_quantised(model: Module) -> None:
    for name, parameter in model.named_parameters():
        if is_quantised_tensor(parameter) and not hasattr(parameter, "fsdp_pre_all_gather"):  # torch's own protocol
            raise ValueError(
                f"{name} is quantised ({type(parameter).__name__}), and rows of packed weights cannot be cut and "
                "joined: train it with strategy='ddp', one whole quantised model per device with adapters (QLoRA); or, "
                "if that fits, keep the quantised base whole on each rank and shard the rest: "
                "FullyShardedDataParallelPlugin(ignored_modules=[…])"
            )


def _raise_precision(model: Module, says: bool) -> None:
    """Give parameters that are trained in half precision fp32 values: the forward's half precision is made of those."""
    half = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
    if not half:
        return
    nbytes = sum(parameter.nbytes for parameter in half)
    for parameter in half:
        parameter.data = parameter.data.float()
    if says:
        warn_user(
            f"{len(half)} trained parameters were in half precision: with mixed precision they are kept in fp32, "
            f"{nbytes / 1e6:,.0f} MB more over all ranks",
        )


def _is_shard(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _rows(tensor: Any) -> Tensor:
    """Return this rank's rows of `tensor`, in its own memory."""
    rows: Tensor = tensor.to_local() if _is_shard(tensor) else tensor
    return rows


def _norm_of_rows(gradients: Sequence[Any], norm_type: float) -> Tensor:
    """Return the norm of sharded `gradients`, plain and equal on all ranks: that of the norms of each rank's rows.

    torch's own cannot compute the largest magnitude where a rank has no rows, of parameters smaller than the number of
    ranks. One number of each rank is gathered, which keeps a NaN.
    """
    from torch.distributed import all_gather
    from torch.distributed.tensor import Shard

    mesh = gradients[0].device_mesh
    if any(g.device_mesh != mesh or mesh.ndim != 1 or not isinstance(g.placements[0], Shard) for g in gradients):
        total: Any = torch.nn.utils.get_total_norm(gradients, norm_type)  # sharded in a way of the program's own
        norm: Tensor = total.full_tensor() if _is_shard(total) else total
        return norm
    rows = [part for gradient in gradients if (part := _rows(gradient)).numel()]
    own = torch.nn.utils.get_total_norm(rows, norm_type) if rows else torch.zeros((), device=_rows(gradients[0]).device)
    norms = [torch.empty_like(own) for _ in range(mesh.size())]
    all_gather(norms, own, group=mesh.get_group())
    of_all: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return of_all
