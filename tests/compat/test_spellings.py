"""How programs that were written for Accelerate spell things, each in a few lines; found in public programs."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import nbaccel
from nbaccel import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin
from nbaccel.testing import run_ranks
from nbaccel.tracking import GeneralTracker


class _Kept(GeneralTracker):
    name = "kept"

    def __init__(self) -> None:
        self.rows: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.rows

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.rows.append(values)


def test_what_has_no_value_is_left_out_by_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log({"ema_decay": None, "loss": 0.5}, step=1)
    accelerator.end_training()
    read = EventAccumulator(str(tmp_path / "run"))
    read.Reload()
    assert read.Tags()["scalars"] == ["loss"]


def test_the_plugin_is_asked_for_where_there_is_a_state() -> None:
    def plugin() -> Any:
        return nbaccel.state.AcceleratorState().deepspeed_plugin if nbaccel.state.is_initialized() else "no state"

    assert plugin() is None
    state = Accelerator().state
    assert (state.deepspeed_plugin, state.fsdp_plugin, state.is_fsdp2) == (None, None, False)


def test_models_of_a_checkpoint_take_options_of_the_program(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(2, 2, bias=False))
    with pytest.warns(UserWarning, match=r"save_state\(…, exclude_frozen_parameters=True\) has no effect"):
        accelerator.save_state(tmp_path / "there", exclude_frozen_parameters=True)
    other = Accelerator()
    model = other.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"Missing key.* in state_dict: \"bias\""):
        other.load_state(tmp_path / "there")
    bias = model.bias.detach().clone()
    other.load_state(tmp_path / "there", strict=False, map_location="cpu")
    assert torch.equal(model.bias, bias)


class _Custom:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_a_program_that_trusts_pickles_says_so_as_torch_does(tmp_path: Path) -> None:
    accelerator, custom = Accelerator(), _Custom(Path("somewhere"))
    accelerator.register_for_checkpointing(custom)
    with pytest.warns(UserWarning, match="saved as a pickle"):
        accelerator.save_state(tmp_path / "there")
    with pytest.raises(nbaccel.UntrustedPickle):
        accelerator.load_state(tmp_path / "there", {"weights_only": True})
    custom.value = None
    accelerator.load_state(tmp_path / "there", {"weights_only": False})
    assert custom.value == Path("somewhere")


def test_handlers_and_plugins_may_be_changed_before_they_are_used() -> None:
    handler = DistributedDataParallelKwargs()
    handler.find_unused_parameters = True
    handler.comm_hook = "fp16"
    assert Accelerator(kwargs_handlers=[handler])._handlers.ddp is handler
    assert handler.comm_hook is nbaccel.DDPCommunicationHookType.FP16
    handler.comm_hook = "int8"
    with pytest.raises(ValueError, match="comm_hook must be one of"):
        Accelerator(kwargs_handlers=[handler])
    plugin = GradientAccumulationPlugin()
    plugin.num_steps = 3
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3


def test_attributes_that_programs_assign(tmp_path: Path) -> None:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model, optimizer = accelerator.prepare(layer := torch.nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerator.scaler = scaler
    before = layer.weight.item()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 8.0  # scaled by the program's
    optimizer.step()
    assert layer.weight.item() == pytest.approx(before - 0.1)
    accelerator.scaler = None
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert layer.weight.grad.item() == 1.0

    plain = Accelerator()
    plain.scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(ValueError, match=r"losses are scaled with mixed_precision='fp16' only; this is 'no'"):
        plain.scaler = scaler
    plain.log_with = "csv"
    assert plain.log_with == ["csv"]
    plain.project_configuration = nbaccel.ProjectConfiguration(tmp_path)
    assert plain.project_dir == tmp_path
    kept = _Kept()
    plain.trackers = [kept]
    plain.log({"loss": 0.5})
    assert kept.rows == [{"loss": 0.5}]
    assert plain.get_tracker("kept") is kept

    plain.sync_gradients = False
    layer = torch.nn.Linear(1, 1)
    optimizer = plain.prepare(torch.optim.SGD(layer.parameters(), 0.1))
    before = layer.weight.item()
    plain.backward(layer(torch.ones(1, 1)).sum())
    optimizer.step()
    assert layer.weight.item() == before
    plain.sync_gradients = True
    optimizer.step()
    assert layer.weight.item() == pytest.approx(before - 0.1)


class _Lists(torch.nn.Module):
    """Gives a list where torch gives an iterator, as some programs' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def parameters(self, recurse: bool = True) -> Any:
        return list(super().parameters(recurse))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.weight * value


def _prepared_list() -> bool:
    return isinstance(Accelerator().prepare(_Lists()), torch.nn.parallel.DistributedDataParallel)


def test_a_model_may_list_its_parameters() -> None:
    assert run_ranks(2, _prepared_list) == [True] * 2


def test_what_is_no_mapping_is_logged_by_trackers_alone() -> None:
    accelerator = Accelerator()
    with pytest.warns(UserWarning, match=r"takes numbers by name.*: this Tensor is shown nowhere"):
        accelerator.log(torch.zeros(2, 3))  # type: ignore[arg-type]
    kept = _Kept()
    accelerator.trackers = [kept]
    accelerator.log(["image"])  # type: ignore[arg-type]
    assert kept.rows == [["image"]]


def _by_keyword() -> list[Any]:
    accelerator = Accelerator()
    mine = torch.tensor([float(accelerator.process_index)])
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.no_sync(model=model):
        accelerator.backward(model(mine[None]).sum())
    return [
        accelerator.gather(tensor=mine).tolist(),
        accelerator.gather_for_metrics(input_data=mine).tolist(),
        accelerator.reduce(tensor=mine).tolist(),
        accelerator.pad_across_processes(tensor=mine).tolist() == mine.tolist(),
    ]


def test_values_are_given_by_accelerates_keywords() -> None:
    assert run_ranks(2, _by_keyword) == [[[0.0, 1.0], [0.0, 1.0], [1.0], True]] * 2
    assert nbaccel.utils.concatenate(data=[torch.zeros(1), torch.ones(1)]).tolist() == [0.0, 1.0]
    assert nbaccel.utils.slice_tensors(torch.arange(3), slice(1), process_index=0, num_processes=2).tolist() == [0]
    assert not nbaccel.utils.is_mps_available(min_version="99.0")
    assert not nbaccel.utils.is_bnb_available(min_version="99.0")


class _Wrapper(logging.LoggerAdapter):  # type: ignore[type-arg]
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": 3})


def test_a_stacklevel_of_the_program_counts_as_in_accelerate(caplog: pytest.LogCaptureFixture) -> None:
    logger = nbaccel.logging.get_logger("program")
    logger.warning("by default")
    logger.warning("given", stacklevel=2)
    _Wrapper(logger, {}).warning("through a wrapper")  # type: ignore[arg-type]
    logger.warning_once("once")
    here = "test_a_stacklevel_of_the_program_counts_as_in_accelerate"
    assert [record.funcName for record in caplog.records] == [here] * 4


def test_models_come_out_of_whatever_is_around_them() -> None:
    extract = nbaccel.utils.extract_model_from_parallel
    layer: Any = torch.nn.Linear(1, 1)
    layer._original_forward = layer.forward
    layer.forward = nbaccel.utils.convert_outputs_to_fp32(layer.forward)
    assert "forward" in vars(extract(layer))
    assert not {"forward", "_original_forward"} & set(vars(extract(layer, keep_fp32_wrapper=False)))
    own: Any = torch.nn.Linear(1, 1)
    own._original_forward = first = lambda value: value
    own.forward = lambda value: value + 1
    assert extract(own, keep_fp32_wrapper=False).forward is first

    inside = torch.compile(torch.nn.DataParallel(layer), backend="eager")
    assert extract(inside)._orig_mod is layer
    assert extract(inside, keep_torch_compile=False) is layer
    compiled: Any = torch.compile(layer, backend="eager")
    assert extract(torch.nn.DataParallel(compiled)) is compiled
    assert Accelerator().unwrap_model(inside)._orig_mod is layer  # type: ignore[comparison-overlap]
    assert Accelerator().unwrap_model(torch.nn.DataParallel(layer)) is layer


def test_a_world_size_that_was_left_behind_is_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    began = time.monotonic()
    assert Accelerator().num_processes == 1
    assert time.monotonic() - began < 30


def test_an_order_that_follows_from_seed_and_epoch() -> None:
    from nbaccel.data_loader import SeedableRandomSampler

    sampler = SeedableRandomSampler(range(6), data_seed=3)
    first, second = list(sampler), list(sampler)
    assert isinstance(sampler, RandomSampler)
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    accelerate = pytest.importorskip("accelerate")
    theirs = accelerate.data_loader.SeedableRandomSampler(range(6), data_seed=3)
    assert [list(theirs), list(theirs)] == [first, second]


def test_values_that_differ_in_shape_are_the_error_that_programs_catch() -> None:
    from nbaccel.utils.operations import DistributedOperationException

    def gathered() -> str:
        accelerator = Accelerator()
        try:
            accelerator.gather(torch.ones(1 + accelerator.process_index))
        except DistributedOperationException:
            return "caught"
        return "gathered"

    assert run_ranks(2, gathered) == ["caught"] * 2


def test_generators_that_are_named_are_accepted_with_a_word() -> None:
    with pytest.warns(UserWarning, match="rng_types=.* has no effect"):
        Accelerator(rng_types=["torch"])
    with pytest.warns(UserWarning, match="rng_types=.* has no effect"):
        nbaccel.data_loader.prepare_data_loader(DataLoader(range(2)), rng_types=["generator"])  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(rng_types=None)


def _asked() -> list[Any]:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.maybe_context_parallel(buffers=[torch.ones(1)], buffer_seq_dims=[0]):
        model(torch.ones(1, 1))
    assert accelerator._models == [model]
    accelerator._models.clear()
    assert not accelerator._context.prepared
    assert [accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders] == [[], [], []]
    assert accelerator.deepspeed_plugin is None
    for absent in ("fp8_backend", "parallelism_config", "torch_device_mesh"):
        assert getattr(accelerator, absent) is None
    for rank in ("tensor_parallel_rank", "pipeline_parallel_rank", "context_parallel_rank", "data_parallel_shard_rank"):
        assert getattr(accelerator, rank) == 0
    assert not accelerator.is_fsdp2
    assert not accelerator.is_composable_parallelism_enabled
    return [accelerator.data_parallel_rank, accelerator.multi_device, accelerator.should_save_model]


def test_whoever_asks_how_the_model_is_spread_hears_that_it_is_not() -> None:
    assert run_ranks(2, _asked) == [[0, torch.cuda.device_count() > 1, True], [1, torch.cuda.device_count() > 1, False]]


def test_the_gradient_state_without_an_accelerator_is_that_of_the_last_one() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    state = nbaccel.state.GradientState()
    accelerator.gradient_accumulation_steps = 4
    accelerator.sync_gradients = False
    assert (state.num_steps, state.sync_gradients) == (4, False)


def test_the_place_in_a_window_is_accelerates() -> None:
    accelerate = pytest.importorskip("accelerate")

    def places(library: Any) -> list[int]:
        accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=3)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(7, 1)))
        found = []
        for batch in [*loader, *loader]:
            with accelerator.accumulate(model):
                found.append(accelerator.step % 3)
                accelerator.backward(model(batch).sum())
                optimizer.step()
        return found

    assert places(nbaccel) == places(accelerate)
