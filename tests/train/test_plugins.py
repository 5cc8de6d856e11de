"""Handlers and plugins: which are accepted, and that what they say reaches DDP, process group and profiler."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.step.kwargs_handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)


def test_each_handler_finds_its_place_and_the_others_keep_their_defaults() -> None:
    scaler, profile = GradScalerKwargs(init_scale=8.0), ProfileKwargs(with_flops=True)
    handlers = Handlers.of([profile, scaler])
    assert (handlers.scaler, handlers.profile) == (scaler, profile)
    assert (handlers.autocast, handlers.ddp) == (AutocastKwargs(), DistributedDataParallelKwargs())
    assert Handlers.of(None) == Handlers()


def test_two_handlers_of_one_class_are_refused() -> None:
    with pytest.raises(ValueError, match="kwargs_handlers has two AutocastKwargs: which one holds"):
        Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs(enabled=False)])


def test_what_is_no_handler_is_refused_with_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"takes AutocastKwargs, Distributed.* of nbaccel.utils, got builtins.dict"):
        Accelerator(kwargs_handlers=[{"find_unused_parameters": True}])  # type: ignore[list-item]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(32, 32)


def _ddp(handler: KwargsHandler) -> dict[str, Any]:
    model: Any = Accelerator(kwargs_handlers=[handler]).prepare(_model())
    names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "broadcast_buffers", "dim")
    return {name: getattr(model, name) for name in names} | {"bucket_bytes": model.bucket_bytes_cap}


def _kept(*handlers: KwargsHandler) -> list[bool]:
    """For three steps, whether gradients that were kept are what they were after the next backward."""
    accelerator = Accelerator(kwargs_handlers=list(handlers))
    net = torch.nn.Linear(3, 2)
    model = accelerator.prepare(net)
    is_kept = []
    for step in range(3):
        accelerator.backward(model(torch.ones(4, 3)).sum() * (step + 1))
        gradients = [parameter.grad for parameter in net.parameters()]
        values = [gradient.clone() for gradient in gradients]  # type: ignore[union-attr]
        net.zero_grad()
        accelerator.backward(model(torch.ones(4, 3)).sum() * -7)
        net.zero_grad()
        is_kept.append(all(map(torch.equal, gradients, values)))  # type: ignore[arg-type]
    return is_kept


def test_a_gradient_that_a_program_keeps_is_not_overwritten_unless_it_chose_that() -> None:
    """As in one process: programs that combine the gradients of two losses would train wrongly, and nobody would see
    it. So `gradient_as_bucket_view`, which spares a copy of the gradients, is for the program to choose.
    """
    assert run_ranks(2, _kept) == [[True] * 3] * 2
    assert (
        run_ranks(2, _kept, DistributedDataParallelKwargs(gradient_as_bucket_view=True)) == [[True, False, False]] * 2
    )


def test_options_reach_ddp() -> None:
    plain = run_ranks(2, _ddp, DistributedDataParallelKwargs())[0]
    assert plain["bucket_bytes"] == 25 * 2**20
    assert not plain["find_unused_parameters"]
    chosen = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1)
    seen = run_ranks(2, _ddp, chosen)[1]
    assert seen == plain | {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_bytes": 2**20}
    assert run_ranks(2, _ddp, DistributedDataParallelKwargs(static_graph=True))[0] == plain | {"static_graph": True}


def _nothing(accelerator: Accelerator, model: Any) -> None:
    pass


def hooked(handler: KwargsHandler, before: Callable[[Accelerator, Any], object] = _nothing) -> list[float]:
    """Return gradients of a training whose communication `handler` changes, which began with `before`."""
    accelerator = Accelerator(kwargs_handlers=[handler])
    model: Any = accelerator.prepare(_model())
    before(accelerator, model)
    for _ in range(3):  # PowerSGD begins with plain steps
        model.zero_grad()
        accelerator.backward(model(torch.full((4, 32), 1.0 + accelerator.process_index)).square().sum())
    return model.module.weight.grad[0, :4].tolist()


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"comm_hook": DDPCommunicationHookType.FP16}, 2e-3),
        ({"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2}}, 1e-3),
        ({"comm_hook": "power_sgd", "comm_wrapper": "fp16", "comm_state_option": {"start_powerSGD_iter": 2}}, 5e-3),
    ],
    ids=["fp16", "power_sgd", "power_sgd in fp16"],
)
def test_hooks_send_gradients_that_are_about_the_same(options: dict[str, Any], tolerance: float) -> None:
    plain = run_ranks(2, hooked, DistributedDataParallelKwargs())[0]
    first, second = run_ranks(2, hooked, DistributedDataParallelKwargs(**options))
    assert first == second
    assert first == pytest.approx(plain, rel=tolerance)
    assert first != plain


def test_the_batched_hook_is_refused_before_the_training_where_torchs_own_fails() -> None:
    def prepared() -> str:
        handler = DistributedDataParallelKwargs(
            comm_hook="batched_power_sgd", comm_state_option={"start_powerSGD_iter": 2}
        )
        try:
            hooked(handler)
        except ValueError as error:
            return str(error)
        return "works"

    message = run_ranks(2, prepared)[0]
    assert message == "works" or message.endswith("fails at its first compressed step. Use 'power_sgd'.")


def test_a_hook_that_the_backend_lacks_is_one_sentence() -> None:
    def prepared() -> str:
        try:
            hooked(DistributedDataParallelKwargs(comm_hook="bf16"))
        except ValueError as error:
            return str(error)
        return "works"

    message = run_ranks(2, prepared)[0]
    if torch.version.cuda is not None:  # such a build lets gloo send bf16, too
        assert message == "works"
    else:
        assert message.startswith("comm_hook='bf16' does not work on cpu with the gloo backend (BF16 all reduce")
        assert message.endswith("Use 'fp16' or 'power_sgd', or leave the hook out.")


def test_unknown_hooks_are_refused_with_the_choices() -> None:
    with pytest.raises(
        ValueError, match="comm_hook must be one of 'no', 'fp16', 'bf16', 'power_sgd', 'batched_power_sgd'"
    ):
        DistributedDataParallelKwargs(comm_hook="int8")
    with pytest.raises(ValueError, match="comm_wrapper must be one of 'no', 'fp16', 'bf16', got 'power_sgd'"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")


def test_a_wrapper_around_nothing_is_refused() -> None:
    def refused() -> str:
        with pytest.raises(ValueError, match="comm_wrapper") as caught:
            Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_wrapper="fp16")]).prepare(_model())
        return str(caught.value)

    assert run_ranks(2, refused)[0].endswith("there is none: use comm_hook='fp16'")


def test_the_process_group_waits_as_long_as_it_is_told() -> None:
    def timeout_s() -> float:
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
        group: Any = torch.distributed.group.WORLD
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    assert run_ranks(2, timeout_s) == [77.0, 77.0]


def _trace(folder: str) -> None:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    model = accelerator.prepare(_model())
    with accelerator.profile():
        accelerator.backward(model(torch.ones(1, 32)).sum())


def test_every_rank_writes_its_trace(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    run_ranks(2, _trace, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["profile_0.json", "profile_1.json"]
    events = json.loads((folder / "profile_1.json").read_text())["traceEvents"]
    assert any(event["name"] == "aten::linear" for event in events)


def test_a_schedule_calls_back_after_each_cycle() -> None:
    cycles: list[int] = []
    options = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 1},
        on_trace_ready=lambda profiler: cycles.append(profiler.step_num),
        record_shapes=True,
    )
    with Accelerator().profile(options) as profiler:
        for _ in range(10):
            torch.ones(2) + 1
            profiler.step()
    assert cycles == [5]


def test_an_unknown_activity_is_refused_with_the_choices() -> None:
    accelerator = Accelerator()
    with (
        pytest.raises(ValueError, match=r"a profiler activity must be one of 'cpu', .*got 'abacus'"),
        accelerator.profile(ProfileKwargs(activities=["abacus"])),  # type: ignore[list-item]
    ):
        pass


REFUSED = ("megatron_lm_plugin", "torch_tp_plugin")


@pytest.mark.parametrize("name", [*REFUSED, "parallelism_config"])
def test_a_plugin_that_is_not_here_is_refused_by_name_with_what_works_instead(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^Accelerator\({name}=…\): .*gradient_checkpointing\(model\)\.$"):
        Accelerator(**{name: object()})
    Accelerator(**{name: None})  # as programs pass on what nobody chose


@pytest.mark.parametrize("name", ["MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_a_plugin_that_accelerate_launch_has_chosen_is_refused_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(NotImplementedError, match=f"ACCELERATE_USE_{name}=true in the environment: .*mixed_precision"):
        Accelerator(cpu=True)


def test_every_argument_of_the_real_constructor_is_taken_or_refused_by_name() -> None:
    accelerate = pytest.importorskip("accelerate")
    theirs = set(inspect.signature(accelerate.Accelerator.__init__).parameters)
    ours = set(inspect.signature(Accelerator.__init__).parameters)
    assert theirs - ours == {*REFUSED, "parallelism_config", "deepspeed_plugins"}
    with pytest.warns(UserWarning, match="rng_types"):
        Accelerator(rng_types=["generator", "torch"])


def test_an_argument_that_nobody_knows_is_a_type_error_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"argument 'mixed_precison'; did you mean mixed_precision\?"):
        Accelerator(mixed_precison="bf16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'zzz'$"):
        Accelerator(zzz=1)  # type: ignore[call-arg]


def test_fp8_is_refused_with_what_there_is_instead() -> None:
    with pytest.raises(ValueError, match=r"got 'fp8'; 8-bit training is not here, use 'bf16' .* or 'fp16'"):
        Accelerator(mixed_precision="fp8")


def test_a_device_of_the_environment_is_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    with pytest.raises(NotImplementedError, match=r"ACCELERATE_TORCH_DEVICE=cuda:1 .* CUDA_VISIBLE_DEVICES"):
        Accelerator()


def test_a_backward_of_lomo_is_refused_with_what_to_use() -> None:
    with pytest.raises(NotImplementedError, match=r"lomo_backward: .* accelerator\.backward\(loss\) with an optimizer"):
        Accelerator().lomo_backward(torch.ones(()), 0.1)
