"""What nbaccel uses of torch's without torch's promise: private names, and public ones that not every torch has.

Each name is looked up by itself in the torch that is installed. Run with another torch, this file says what has moved.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.torch_version import TorchVersion

from environments import REPOSITORY
from nbaccel import PartialState
from nbaccel.testing import run_ranks

PACKAGE = REPOSITORY / "nbaccel"

UNGUARDED = {
    "_clip_grads_with_norm_": "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "_group_tensors_by_device_and_dtype": "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype",
    # torch, torch.cuda, torch.autograd
    "_C": "torch._C.DisableTorchFunctionSubclass",
    "_functorch": "torch._C._functorch.maybe_current_level",
    "_storage_Use_Count": "torch._C._storage_Use_Count(torch.ones(1).untyped_storage()._cdata)",
    "_cdata": "torch.ones(1).untyped_storage()._cdata",
    "_untyped_storage": "torch.storage.TypedStorage(1, dtype=torch.uint8, _internal=True)._untyped_storage",
    "_foreach_add_": "torch._foreach_add_([torch.ones(1)], [torch.ones(1)])",
    "_foreach_copy_": "torch._foreach_copy_([torch.ones(1)], [torch.ones(1)])",
    "_foreach_mul_": "torch._foreach_mul_([torch.ones(1)], 2.0)",
    "_foreach_zero_": "torch._foreach_zero_([torch.ones(1)])",
    "_is_in_bad_fork": "torch.cuda._is_in_bad_fork()",
    "_lazy_call": "torch.cuda._lazy_call",
    "_engine_run_backward": "torch.autograd._engine_run_backward",
    "_functional_call": "torch.nn.utils.stateless._functional_call",
    "_disable_current_modes": "python_dispatch._disable_current_modes",
    "_get_current_dispatch_mode": "python_dispatch._get_current_dispatch_mode()",
    "_pop_mode": "python_dispatch._pop_mode",
    "_push_mode": "python_dispatch._push_mode",
    "_get_current_dispatch_mode_stack": "python_dispatch._get_current_dispatch_mode_stack()",
    "_python_dispatch": "torch.utils._python_dispatch.TorchDispatchMode",
    "_pytree": "(pytree.tree_flatten, pytree.tree_leaves, pytree.tree_unflatten)",
    "_subclasses": "(torch._subclasses.FakeTensorMode, torch._subclasses.fake_tensor.FakeCopyMode)",
    "_dynamo": "torch._dynamo.eval_frame.OptimizedModule",
    "_get_build_directory": "__import__('torch.utils.cpp_extension').utils.cpp_extension._get_build_directory",
    "_orig_mod": "torch.compile(module, backend='eager')._orig_mod",
    # tensors, the graph, operators
    "_backward_hooks": "torch.ones(1)._backward_hooks",
    "_values": "torch.eye(2).to_sparse()._values()",
    "_post_accumulate_grad_hooks": "torch.ones(1)._post_accumulate_grad_hooks",
    "_amp_foreach_non_finite_check_and_unscale_": "torch._amp_foreach_non_finite_check_and_unscale_",
    "_amp_update_scale_": "torch._amp_update_scale_",
    "_base": "torch.ones(2)[:1]._base",
    "_version": "torch.ones(1)._version",
    "_schema": "torch.ops.aten.add.Tensor._schema.name",
    "_c10d_functional": "torch.ops._c10d_functional.all_reduce",
    "_input_metadata": "leaf.exp().grad_fn._input_metadata[0].shape",
    "_saved_alpha": "(leaf + leaf).grad_fn._saved_alpha",
    "_saved_batch_first": "generated('_cudnn_rnn', 'batch_first')",
    "_saved_dim": "leaf.sum(1).grad_fn._saved_dim",
    "_saved_index": "leaf.select(0, 1).grad_fn._saved_index",
    "_saved_indices": "leaf[torch.tensor([1])].grad_fn._saved_indices",
    "_saved_other": "(leaf * leaf).grad_fn._saved_other",
    "_saved_reduction": "nll.grad_fn._saved_reduction",
    "_saved_self": "(leaf * leaf).grad_fn._saved_self",
    "_saved_total_weight": "nll.grad_fn._saved_total_weight",
    # modules and optimizers
    "_BatchNorm": "torch.nn.modules.batchnorm._BatchNorm",
    "_NormBase": "torch.nn.modules.batchnorm._NormBase",
    "_apply": "module._apply",
    "_buffers": "module._buffers",
    "_non_persistent_buffers_set": "module._non_persistent_buffers_set",
    "_check_reducer_finalized": "torch._C._distributed_c10d.Reducer._check_reducer_finalized",
    "_rebuild_buckets": "torch._C._distributed_c10d.Reducer._rebuild_buckets",
    "_call_impl": "module._call_impl",
    "_wrapped_call_impl": "module._wrapped_call_impl",
    "_compiled_call_impl": "module._compiled_call_impl",
    "_extra_state": "torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX",
    "_modules": "module._modules",
    "_parameters": "module._parameters",
    "_opt_called": "stepped._opt_called",
    "_found_inf_per_device": "torch.amp.GradScaler._found_inf_per_device",
    "_per_optimizer_states": "torch.amp.GradScaler('cpu')._per_optimizer_states",
    # loaders
    "_BaseDataLoaderIter": "dataloader._BaseDataLoaderIter",
    "_DatasetKind": "dataloader._DatasetKind.Map",
    "_MapDatasetFetcher": "dataloader._utils.fetch._MapDatasetFetcher.fetch",
    "_IterableDatasetFetcher": "dataloader._utils.fetch._IterableDatasetFetcher.fetch",
    "_MultiProcessingDataLoaderIter": "dataloader._MultiProcessingDataLoaderIter",
    "_SingleProcessDataLoaderIter": "dataloader._SingleProcessDataLoaderIter",
    "_utils": "dataloader._utils.signal_handling",
    "_remove_worker_pids": "dataloader._utils.signal_handling._remove_worker_pids",
    "_get_iterator": "torch.utils.data.DataLoader._get_iterator",
    "_iterator": "loader._iterator",
    "_auto_collation": "iterator._auto_collation",
    "_base_seed": "iterator._base_seed",
    "_collate_fn": "iterator._collate_fn",
    "_dataset": "iterator._dataset",
    "_dataset_kind": "iterator._dataset_kind",
    "_index_sampler": "iterator._index_sampler",
    "_next_data": "iterator._next_data",
    "_next_index": "iterator._next_index",
    "_num_workers": "iterator._num_workers",
    "_num_yielded": "iterator._num_yielded",
    "_reset": "iterator._reset",
    "_sampler_iter": "iterator._sampler_iter",
    "_send_idx": "sets(dataloader._MultiProcessingDataLoaderIter, '_send_idx')",
    "_shutdown": "sets(dataloader._MultiProcessingDataLoaderIter, '_shutdown')",
    "_shutdown_workers": "dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
    "_worker_init_fn": "sets(dataloader._MultiProcessingDataLoaderIter, '_worker_init_fn')",
    "_workers": "sets(dataloader._MultiProcessingDataLoaderIter, '_workers')",
    # torch.distributed
    "_world": "(c10d._world.pg_map, c10d._world.pg_backend_config)",
    "_device_types": "torch.distributed.ProcessGroup._device_types",
    "_get_default_group": "c10d._get_default_group",
    "_get_default_store": "c10d._get_default_store",
    "_get_sequence_number_for_group": "torch.distributed.ProcessGroup._get_sequence_number_for_group",
    "_register_comm_hook": "torch.distributed._register_comm_hook",
    "_rendezvous_handlers": "rendezvous._rendezvous_handlers['env']",
    "_orthogonalize": "powersgd._orthogonalize",
    "_wrap": "spawn._wrap",
    "_forward_hooks": "module._forward_hooks",
    "_forward_pre_hooks": "module._forward_pre_hooks",
    "_is_view": "torch.ones(2)._is_view()",
}
"""Names without which something fails, and how each is come by."""

SHARDED = {
    "_composable": "contract._get_registry",
    "_composable_state": "composable_state._module_state_mapping",
    "_get_registry": "contract._get_registry(sharded)",
    "_module_state_mapping": "composable_state._module_state_mapping[sharded]",
    "_get_fsdp_state": "sharded._get_fsdp_state()",
    "_pre_forward_hook_handle": "sharded._get_fsdp_state()._pre_forward_hook_handle",
    "_post_forward_hook_handle": "sharded._get_fsdp_state()._post_forward_hook_handle",
    "_local_tensor": "sharded.weight._local_tensor",
    "_op_dispatcher": "distributed_tensor._op_dispatcher",
    "_custom_op_handlers": "distributed_tensor._op_dispatcher._custom_op_handlers",
    "_local_scalar_dense": "torch.ops.aten._local_scalar_dense.default",
    "_is_fsdp_managed_module": "sharded._is_fsdp_managed_module",
    "_fsdp_use_orig_params": "sharded._fsdp_use_orig_params",
}
"""Further ones, of models that are sharded, which start threads: looked up in a process of their own."""

ABANDONED = {
    "_is_root": "sharded._get_fsdp_state()._is_root",
    "_comm_ctx": "sharded._get_fsdp_state()._comm_ctx.all_gather_state",
    "_state_ctx": "sharded._get_fsdp_state()._state_ctx.iter_forward_root",
    "_modules_to_run_forward": "sharded._get_fsdp_state()._modules_to_run_forward",
    "_all_gather_result": "group._all_gather_result",
    "_post_reduce_event": "group._post_reduce_event",
    "_reshard_after_forward_event": "group._reshard_after_forward_event",
    "_post_forward_indices": "group._post_forward_indices",
    "_training_state": "(group._training_state, sharded._get_fsdp_state()._training_state)",
    "_to_sharded": "group._to_sharded",
    "_unsharded_param": "group.fsdp_params[0]._unsharded_param",
    "_dim_group_names": "sharded.weight.device_mesh._dim_group_names",
}
"""Those by which a step of such a model is abandoned, with torch 2.10 and later."""

RENAMED = {
    "_fsdp_param_group": ("2.10", "2.12", "sharded._get_fsdp_state()._fsdp_param_group"),
    "_fsdp_param_groups": ("2.13", "", "sharded._get_fsdp_state()._fsdp_param_groups"),
    "_pg_registry": ("2.11", "", "sharded.weight.device_mesh._pg_registry"),
}
"""Further ones that only some versions have: the first one, and the last one if there is any."""

GUARDED = {
    "_milestones": ("2.6", "sequence._milestones"),
    "_schedulers": ("2.6", "sequence._schedulers"),
    "_cuda_clearCublasWorkspaces": ("2.6", "torch._C._cuda_clearCublasWorkspaces if torch.version.cuda else None"),
    "_cuda_hasPrimaryContext": ("2.6", "torch._C._cuda_hasPrimaryContext if torch.version.cuda else None"),
    "_host_emptyCache": ("2.6", "torch._C._host_emptyCache if torch.version.cuda else None"),
    "_comm_hooks": ("2.6", "sets(torch.nn.parallel.DistributedDataParallel, '_comm_hooks')"),
    "_ddp_params_and_buffers_to_ignore": ("2.6", "ignoring._ddp_params_and_buffers_to_ignore"),
    "_get_backend": ("2.6", "torch.distributed.ProcessGroup._get_backend"),
    "_cuda_getArchFlags": ("2.6", "torch._C._cuda_getArchFlags if torch.version.cuda else None"),
    "_set_default_timeout": ("2.6", "torch._C._distributed_c10d.ProcessGroupGloo._set_default_timeout"),
    "_update_default_pg": ("2.6", "c10d._update_default_pg"),
    "_assign_modules_buffers": ("2.6", "torch.nn.parallel.DistributedDataParallel._assign_modules_buffers"),
    "_sync_module_buffers": ("2.6", "torch.nn.parallel.DistributedDataParallel._sync_module_buffers"),
    "_join_config": ("2.6", "sets(torch.distributed.algorithms.join.Joinable, '_join_config')"),
    "_timeout": ("2.6", "torch._C._distributed_c10d.ProcessGroupGloo._Options._timeout"),
    "_get_current_function_mode_stack": ("2.6", "torch.overrides._get_current_function_mode_stack()"),
    "_device": ("2.6", "device.DeviceContext"),
    "_tensor_str": ("2.6", "vars(torch._tensor_str.PRINT_OPTS)"),
    "_fp32_precision": ("2.9", "torch.backends.mkldnn.set_flags(_fp32_precision=None)"),
    "_in_order": ("2.6", "sets(dataloader._MultiProcessingDataLoaderIter, '_in_order')"),
    "_shared_seed": ("2.6", "iterator._shared_seed"),
    "_raw_saved_": ("2.6", "leaf.exp().grad_fn._raw_saved_result"),
    "_saved_dimension": ("2.6", "leaf.unfold(0, 1, 1).grad_fn._saved_dimension"),
    "_saved_dims": ("2.6", "generated('flip', 'dims')"),
    "_saved_input": ("2.6", "torch.conv1d(torch.ones(1, 1, 2), leaf[None, :1, :1]).grad_fn._saved_input"),
    "_step_supports_amp_scaling": (
        "2.6",
        "torch.optim.Adam(module.parameters(), fused=True)._step_supports_amp_scaling",
    ),
    "_state_dict_pre_hooks": ("2.6", "module._state_dict_pre_hooks"),
    "_StorageInfo": ("2.6", "dcp_files._StorageInfo"),
    "_StoragePrefix": ("2.6", "dcp_files._StoragePrefix"),
    "_get_layout": ("2.6", "torch.serialization._get_layout"),
    "_use_count": ("2.6", "torch.ones(1)._use_count()"),
    "_WrappedHook": ("2.6", "torch.nn.modules.module._WrappedHook"),
    "_wrapped_by_lr_sched": ("2.6", "stepped.step._wrapped_by_lr_sched"),
}
"""Names that are asked for, not relied on: the version from which on each is there, and how it is come by."""

VERSIONED = {
    "abort": ("2.7", "torch.distributed.ProcessGroup.abort"),
    "all_gather_single": ("2.13", "torch.distributed.all_gather_single"),
    "clone": ("2.9", "torch.distributed.Store.clone"),
    "empty_host_cache": ("2.13", "torch.accelerator.empty_host_cache"),
    "fp32_precision": ("2.9", "(torch.backends.fp32_precision, torch.backends.cudnn.conv.fp32_precision)"),
    "get_per_process_memory_fraction": ("2.6", "torch.cuda.get_per_process_memory_fraction"),
    "get_total_norm": ("2.6", "torch.nn.utils.get_total_norm"),
    "in_order": ("2.6", "torch.utils.data.DataLoader([1], in_order=True)"),
}
"""Public names that torch 2.6 or later brought: the version from which on each is there, and how it is come by."""

OTHERS = {
    "deepspeed": "_broadcast_model _config _external_params _hp_optimizer_states_linked "
    "_lazy_init_hp_params_optimizer_state _link_all_hp_params _original_parameters _running_engine_backward",
    "python": """
        _Pointer _PyRuntime _actions _actual_context _addHandlerRef _afterfork_registry _args _asdict _asyncio
        _builtin_open _check_running
        _children _clear_internal_caches _clear_type_cache
        _concrete_contexts _ctx _current_frames _default_context _event_loop_policy _executor _exit
        _exit_function _fields _filters_mutated _finalizer_registry _fork_intent _forkserver _forkserver_
        _forkserver_alive_fd _getframe _handlerList _idle_semaphore _inherited_fds _initargs _initializer
        _io _kwargs _levelToName _local _max_tasks_per_child _max_workers _maxtasksperchild _mp_context _ncallbacks
        _notempty
        _option_string_actions _parent_pid _popen _posixsubprocess _processes _python_exit _recv_bytes
        _register_atexit _registered_with_atexit _registry _replace _resource_tracker _rlock
        _run_after_forkers _run_exitfuncs _shutdown _shutdown_lock _shutdown_thread _signal _start_new_thread
        _start_thread _state _struct _target _threading_atexits _threads_queues _threads_wakeups _waiters
        _warnings_showwarning _weakref _work_queue""",
    "IPython, ipykernel, pyzmq, ipywidgets": """
        _allow_stdin _filename_map _instance _ipython_cache _object_find _oh _original_stdstream_copy _publish_status
        _recv_callback _recv_copy _reloader _render_traceback_ _run_callback _shell_channel_to_main
        _showtraceback _topic _trait_notifiers _trait_values _traits _view_count""",
    "numpy, pandas, matplotlib, scipy": """
        _axstack _clear_cache _core _edgecolors _facecolors _get_autoscale_on _indices _invalidx _invalidy _left_title
        _localaxes _ndarray _reconstruct _registered_options _rgba_bad _rgba_over _rgba_under _right_title _stale
        _subslice _suptitle _supxlabel _supylabel _update_inplace _x _xorig _y _yorig""",
    "transformers, accelerate, peft": """
        _hf_hook _is_accelerate_prepared _mixed_precision _move_model_to_device _n_gpu
        _no_split_modules _old_forward _original_forward _save_checkpoint _setup_devices
        _shared_state _tie_weights _train_batch_size""",
    "Lightning": """
        _AcceleratorConnector _Connector _EvaluationLoop _IS_INTERACTIVE _MultiProcessingLauncher
        _SubprocessScriptLauncher _accelerator_connector _devices_flag _num_nodes_flag _start_method _trainer""",
    "other libraries": """
        _NativeDistModel _active_run_stack _console _dataloaders _distributed _eval_dataloaders _has_internet _init_pid
        _is_initialized _is_jupyter _is_kaggle _login _num_processes _num_replicas _original_start_new_thread
        _original_tracing _params _process_index""",
    "tensorboard": "_async_writer _get_file_writer _worker",
    "nbaccel, in the objects of others": """_fingerprint _nbaccel_cut _nbaccel_dispatch _nbaccel_lone_pass
        _nbaccel_made_with _nbaccel_original _nbaccel_pass _nbaccel_stored""",
}
"""Private names that are not torch's."""

ROOTS = {"torch", "dist", "c10d", "distributed", "dataloader", "loaders", "rendezvous", "powerSGD_hook"}
"""What torch and its modules are called in nbaccel."""

_PRIVATE = re.compile(r"_[A-Za-z][A-Za-z0-9_]*")


class Live:
    """What the expressions above speak of, made when it is first asked for."""

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    @property
    def torch(self) -> Any:
        import torch.utils.data

        return torch

    @property
    def dataloader(self) -> Any:
        from torch.utils.data import dataloader

        return dataloader

    @property
    def c10d(self) -> Any:
        from torch.distributed import distributed_c10d

        return distributed_c10d

    @property
    def dcp_files(self) -> Any:
        from torch.distributed.checkpoint import filesystem

        return filesystem

    @property
    def python_dispatch(self) -> Any:
        from torch.utils import _python_dispatch

        return _python_dispatch

    @property
    def pytree(self) -> Any:
        from torch.utils import _pytree

        return _pytree

    @property
    def device(self) -> Any:
        from torch.utils import _device

        return _device

    @property
    def powersgd(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        return powerSGD_hook

    @property
    def spawn(self) -> Any:
        return importlib.import_module("torch.multiprocessing.spawn")  # a function has its name, too

    @property
    def contract(self) -> Any:
        return importlib.import_module("torch.distributed._composable.contract")

    @property
    def composable_state(self) -> Any:
        return importlib.import_module("torch.distributed._composable_state")

    @functools.cached_property
    def sharded(self) -> Any:
        from torch.distributed.fsdp import fully_shard

        PartialState().wait_for_everyone()  # forms the process group
        model = fully_shard(torch.nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()  # some are made by a first forward
        return model

    @property
    def group(self) -> Any:
        state = self.sharded._get_fsdp_state()
        return state._fsdp_param_groups[0] if is_at_least("2.13") else state._fsdp_param_group

    @property
    def distributed_tensor(self) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor

    @property
    def rendezvous(self) -> Any:
        return importlib.import_module("torch.distributed.rendezvous")

    @property
    def leaf(self) -> Any:
        return torch.ones(2, 2, requires_grad=True)

    @property
    def nll(self) -> Any:
        return torch.nn.functional.nll_loss(self.leaf, torch.tensor([0, 1]))

    @property
    def module(self) -> Any:
        return torch.nn.Linear(1, 1)

    @property
    def ignoring(self) -> Any:
        module = torch.nn.Linear(1, 1)
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
        return module

    @property
    def stepped(self) -> Any:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        optimizer.step()
        return optimizer

    @property
    def sequence(self) -> Any:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
        parts = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])

    @property
    def loader(self) -> Any:
        return torch.utils.data.DataLoader([1, 2])

    @property
    def iterator(self) -> Any:
        return iter(self.loader)

    @staticmethod
    def sets(kind: Any, name: str) -> bool:
        """Whether the methods of `kind` set that attribute."""
        methods = [method.__code__ for method in vars(kind).values() if hasattr(method, "__code__")]
        if not any(name in code.co_names for code in methods):
            raise AttributeError(name)
        return True

    @staticmethod
    def generated(operator: str, argument: str) -> bool:
        """Whether `operator` still has an argument of that name, which its node in the graph keeps.

        For nodes that this machine cannot make.
        """
        packet = getattr(torch.ops.aten, operator)
        schemas = [getattr(packet, name)._schema for name in packet.overloads()]
        if not any(each.name == argument for schema in schemas for each in schema.arguments):
            raise AttributeError(argument)
        return True


def look_up(expression: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eval(expression, {}, Live())


@functools.cache
def names_used() -> tuple[dict[str, str], dict[str, str]]:
    """Private names in nbaccel, on modules of torch's and on anything else, and where each one stands.

    What nbaccel has under the same name itself is seen only on modules of torch's.
    """
    of_torch: dict[str, str] = {}
    of_others: dict[str, str] = {}
    own: set[str] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(REPOSITORY))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        in_f_strings = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    own.add(node.attr)
                elif _root(node) in ROOTS:
                    of_torch.setdefault(node.attr, f"{place}:{node.lineno}")
                else:
                    of_others.setdefault(node.attr, f"{place}:{node.lineno}")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in _imported(node):
                    of_torch.setdefault(name, f"{place}:{node.lineno}")
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node not in in_f_strings
                and re.fullmatch(r"_[A-Za-z_]*[a-z]_?", node.value)
            ):
                of_others.setdefault(node.value, f"{place}:{node.lineno}")
    private = {name: at for name, at in of_torch.items() if _PRIVATE.fullmatch(name)}
    foreign = {name: at for name, at in of_others.items() if _PRIVATE.fullmatch(name) and name not in own}
    return private, foreign


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Each part of the names of torch's that it imports."""
    for alias in node.names:
        whole = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        if whole.partition(".")[0] == "torch":
            yield from whole.split(".")[1:]


def is_at_least(version: str) -> bool:
    return TorchVersion(torch.__version__.partition("+")[0]) >= version


def missing(expressions: dict[str, str]) -> dict[str, str]:
    """Return the names that this torch does not have, and what it says instead. Each is looked up, whatever fails."""
    errors: dict[str, str] = {}
    for name, expression in expressions.items():
        try:
            look_up(expression)
        except Exception as error:
            errors[name] = f"{expression}: {type(error).__name__}: {error}"
    return errors


def test_a_lookup_that_fails_does_not_hide_the_next() -> None:
    assert list(missing({"a": "torch._nowhere", "b": "torch.ones(1)", "c": "1 / 0"})) == ["a", "c"]


def test_every_name_that_nbaccel_relies_on_is_there() -> None:
    assert missing(UNGUARDED) == {}, f"this is torch {torch.__version__}"
    of_shards = SHARDED | ABANDONED if is_at_least("2.10") else SHARDED
    for name, (first, last, expression) in RENAMED.items():
        if is_at_least(first) and (not last or not is_at_least(f"{last}.99")):
            of_shards = of_shards | {name: expression}
    assert run_ranks(1, missing, of_shards) == [{}], f"this is torch {torch.__version__}"


def test_every_name_that_nbaccel_asks_for_is_there_from_its_version_on() -> None:
    expected = {name: row for name, (since, row) in (GUARDED | VERSIONED).items() if is_at_least(since)}
    assert missing(expected) == {}, f"this is torch {torch.__version__}"


def test_no_private_name_of_torchs_is_used_that_is_not_listed_here() -> None:
    of_torch, foreign = names_used()
    listed = UNGUARDED.keys() | GUARDED.keys() | SHARDED.keys() | ABANDONED.keys() | RENAMED.keys()
    elsewhere = {name for names in OTHERS.values() for name in names.split()}
    unlisted = {name: at for name, at in of_torch.items() if name not in listed}
    unlisted |= {name: at for name, at in foreign.items() if name not in listed | elsewhere}
    assert unlisted == {}, "torch's belong into UNGUARDED or GUARDED, those of other libraries into OTHERS"


def test_no_name_is_listed_that_is_not_used() -> None:
    """A word of the sources, in code or in text."""
    words = {
        word for path in sorted(PACKAGE.rglob("*.py")) for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    others = {name for names in OTHERS.values() for name in names.split()}
    assert (
        UNGUARDED.keys()
        | SHARDED.keys()
        | ABANDONED.keys()
        | RENAMED.keys()
        | GUARDED.keys()
        | VERSIONED.keys()
        | others
    ) - words == set()
