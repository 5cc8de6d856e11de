"""Which devices and which start a request gets, and the sentence for one that cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeGpu, FakeNvml, two_t4s, visible_gpus
from nbaccel.base.forkable import AUTOGRAD_HAS_THREADS, CUDA_IS_INITIALISED, DRIVER_IS_IN_USE
from nbaccel.base.hardware import Driver, Gpu, Survey
from nbaccel.errors import CannotFork, LaunchRefused, NoSuchDevice
from nbaccel.launching.ipc.spec import Devices, Start
from nbaccel.launching.preflight import choose_devices, choose_start, threads_per_rank

GB = 10**9


def survey(nvml: FakeNvml, visible: str | None = None) -> Survey:
    return Survey(gpus=visible_gpus(nvml, visible, "FASTEST_FIRST"))


NO_GPU = survey(FakeNvml(has_driver=False))
ONE_T4 = survey(two_t4s(), "0")
SECOND_T4 = survey(two_t4s(), "1")
BY_UUID = survey(two_t4s(), "GPU-aab")
UNLIKE = survey(FakeNvml([FakeGpu("T4", "GPU-1"), FakeGpu("A100", "GPU-2", clock_mhz=1)]))
TWO_T4S = survey(two_t4s())


# --- devices


@pytest.mark.parametrize(
    ("machine", "asked", "ranks", "visible"),
    [
        pytest.param(TWO_T4S, None, 2, "0,1", id="auto takes all"),
        pytest.param(TWO_T4S, 1, 1, "0", id="fewer than there are"),
        pytest.param(ONE_T4, None, 1, "0", id="auto on one"),
        pytest.param(SECOND_T4, None, 1, "1", id="auto on the second one"),
        pytest.param(BY_UUID, None, 1, "GPU-aabb2222", id="a list of uuids"),
        pytest.param(UNLIKE, None, 2, "GPU-1,GPU-2", id="an order that is a guess"),
        pytest.param(NO_GPU, None, 1, None, id="auto on none"),
        pytest.param(NO_GPU, 4, 4, None, id="any number on the CPU"),
    ],
)
def test_each_rank_gets_a_device(machine: Survey, asked: int | None, ranks: int, visible: str | None) -> None:
    devices = choose_devices(asked, None, False, machine)
    assert devices.num_processes == ranks
    assert devices.environ().get("CUDA_VISIBLE_DEVICES") == visible
    assert devices.device_type == ("cpu" if visible is None else "cuda")


@pytest.mark.parametrize(("asked", "ranks"), [(None, 1), (3, 3)])
def test_cpu_hides_the_gpus_and_takes_any_number(asked: int | None, ranks: int) -> None:
    devices = choose_devices(asked, None, True, TWO_T4S)
    assert devices.num_processes == ranks
    assert devices.environ() == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [("1", ["GPU-aabb2222"]), ("1, 0", ["GPU-aabb2222", "GPU-aaaa1111"]), ("GPU-aab", ["GPU-aabb2222"])],
)
def test_named_devices_are_taken_in_the_order_named(devices: str, chosen: list[str]) -> None:
    assert [gpu.uuid for gpu in choose_devices(None, devices, False, TWO_T4S).gpus] == chosen


FOUR_T4S = Survey(tuple(Gpu(index, f"GPU-{index}", "Tesla T4", 16 * GB, number=index) for index in range(4)))


def test_named_devices_are_shared_out_equally() -> None:
    devices = choose_devices(2, "0,1,2,3", False, FOUR_T4S)
    assert [[gpu.index for gpu in devices.of_rank(rank)] for rank in range(2)] == [[0, 1], [2, 3]]
    assert devices.names() == ("GPU 0, 1", "GPU 2, 3")
    assert [rank for rank, _ in devices.each()] == [0, 0, 1, 1]
    assert devices.in_short(60) == "2 ranks on GPU 0-3, 2 each (Tesla T4)"
    assert str(choose_devices(1, "1,0", False, FOUR_T4S)) == "1 rank on GPU 1 Tesla T4, GPU 0 Tesla T4"
    assert len(choose_devices(2, None, False, FOUR_T4S).gpus) == 2  # as many as there are ranks


@pytest.mark.parametrize(
    ("named", "ranks", "message"),
    [
        ("0,1,2", 2, "--devices 0,1,2 names 3 GPUs for 2 ranks (-n 2), and each has as many as the others: "
                     "name 2 or 4 of them."),
        ("0,1,2,3", 3, "--devices 0,1,2,3 names 4 GPUs for 3 ranks (-n 3), and each has as many as the others: "
                       "name 3 of them."),
    ],
)  # fmt: skip
def test_named_devices_without_equal_shares_are_refused(named: str, ranks: int, message: str) -> None:
    with pytest.raises(NoSuchDevice) as refused:
        choose_devices(ranks, named, False, FOUR_T4S)
    assert str(refused.value) == message


def test_device_numbers_count_what_is_visible() -> None:
    (gpu,) = choose_devices(None, "0", False, survey(two_t4s(), "1")).gpus
    assert gpu.uuid == "GPU-aabb2222"


def test_devices_without_a_certain_name_are_left_to_cuda() -> None:
    nameless = Devices(1, (Gpu(0, "", "NVIDIA A100 MIG 1g.5gb", 5 * GB),))
    assert nameless.environ() == {}
    assert not nameless.can_be_told_apart


SILENT = Survey(driver=Driver(silence="Driver/library version mismatch", refusal="unknown error"))


def test_a_run_that_has_to_take_the_cpu_says_why_loudly() -> None:
    assert str(choose_devices(2, None, False, SILENT)) == (
        "2 ranks on the CPU, NOT on a GPU: the driver does not answer (NVML: Driver/library version mismatch; "
        "CUDA: unknown error)"
    )
    assert str(choose_devices(2, None, True, SILENT)) == "2 ranks on the CPU"  # as it was asked to
    hidden = Survey.take(two_t4s(), {"CUDA_VISIBLE_DEVICES": ""}, Path("/nowhere"))
    assert str(choose_devices(None, None, False, hidden)) == (
        "1 rank on the CPU, NOT on a GPU: CUDA_VISIBLE_DEVICES='' hides all 2 GPUs"
    )


def test_a_named_device_that_the_driver_does_not_give_is_refused_with_the_reason() -> None:
    with pytest.raises(NoSuchDevice, match=r"there is no GPU '0'; the driver does not answer \(NVML: Driver/library"):
        choose_devices(None, "0", False, SILENT)


INLINE = Start("inline", "asked for", is_explicit=True)


def test_a_run_in_this_process_takes_its_first_device_and_hides_none_for_the_notebooks_life() -> None:
    devices = choose_devices(1, None, False, TWO_T4S).started_by(INLINE)
    assert devices.device_type == "cuda"
    assert devices.environ() == {}
    assert choose_devices(1, "0", False, TWO_T4S).started_by(INLINE).environ() == {}
    on_the_cpu = choose_devices(1, None, True, TWO_T4S).started_by(INLINE)
    assert (on_the_cpu.device_type, on_the_cpu.environ()) == ("cpu", {})


def test_another_device_than_the_first_cannot_be_had_in_this_process() -> None:
    chosen = choose_devices(None, "1", False, TWO_T4S)
    assert chosen.started_by(Start("zygote", "")) is chosen
    with pytest.raises(LaunchRefused) as refused:
        chosen.started_by(INLINE)
    assert str(refused.value) == (
        "the run would be in the notebook's own process (inline: asked for), where CUDA cannot be given other devices: "
        "leave --devices out and say torch.device('cuda', 1) in the code for Tesla T4, or use --start zygote, whose "
        "rank sees that GPU alone."
    )


def test_more_ranks_than_gpus_is_one_sentence_with_both_ways_out() -> None:
    with pytest.raises(NoSuchDevice) as refused:
        choose_devices(2, None, False, ONE_T4)
    assert str(refused.value) == (
        "2 processes were asked for (-n 2), but there is 1 GPU: 0 Tesla T4. "
        "Each rank needs its own: use -n 1, or --cpu to run 2 ranks on the CPU."
    )


def test_more_ranks_than_named_gpus_are_refused_too() -> None:
    with pytest.raises(NoSuchDevice, match=r"there is 1 GPU: 1 Tesla T4\. .*use -n 1, or --cpu"):
        choose_devices(2, "1", False, TWO_T4S)


@pytest.mark.parametrize(
    ("machine", "devices", "message"),
    [
        (TWO_T4S, "0,7", "--devices 0,7: there is no GPU '7'; there are 2 GPUs: 0 Tesla T4, 1 Tesla T4. Name some"),
        (TWO_T4S, "GPU-aa", "--devices GPU-aa: 'GPU-aa' fits 2 GPUs; there are 2 GPUs"),
        (TWO_T4S, "0,0", "--devices 0,0: GPU '0' is named twice, and each rank needs its own."),
        (TWO_T4S, "", "--devices : there is no GPU ''"),
        (NO_GPU, "0", "NVML sees no GPU here. Leave --devices out to run on the CPU."),
    ],
)
def test_a_device_that_is_not_there_is_named(machine: Survey, devices: str, message: str) -> None:
    with pytest.raises(NoSuchDevice) as refused:
        choose_devices(None, devices, False, machine)
    assert message in str(refused.value)


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_process_is_refused(count: int) -> None:
    with pytest.raises(LaunchRefused, match=rf"num_processes \(-n\) must be 1 or more, or auto; got {count}"):
        choose_devices(count, None, False, TWO_T4S)


def test_cpu_and_devices_contradict_each_other() -> None:
    with pytest.raises(LaunchRefused, match="--cpu and --devices 0 contradict each other: leave one of them out"):
        choose_devices(None, "0", True, TWO_T4S)


def test_the_weakest_gpu_limits_the_run() -> None:
    a100 = Gpu(0, "GPU-1", "A100", 40 * GB, compute_capability=(8, 0))
    t4 = Gpu(1, "GPU-2", "T4", 16 * GB, compute_capability=(7, 5))
    assert Devices(2, (a100, t4)).weakest_gpu is t4
    assert Devices(2).weakest_gpu is None


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (Devices(2, TWO_T4S.gpus), "2 ranks on GPU 0 Tesla T4, GPU 1 Tesla T4"),
        (Devices(1), "1 rank on the CPU"),
    ],
)
def test_devices_read_as_a_sentence(devices: Devices, text: str) -> None:
    assert str(devices) == text


# --- start


def start(requested: str = "auto", **facts: object) -> Start:
    usual = {"world_size": 2, "platform_can_fork": True, "why_forks_fail": None}
    return choose_start(requested, **{**usual, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "fork: the notebook has not used CUDA"),
        ({"why_forks_fail": CUDA_IS_INITIALISED}, "zygote: CUDA is initialised in the notebook"),
        (
            {"why_forks_fail": AUTOGRAD_HAS_THREADS, "since": "cell [3]"},
            "zygote: autograd has device threads in the notebook since cell [3]",
        ),
        (
            {"why_forks_fail": CUDA_IS_INITIALISED, "since": "cell [7]"},
            "zygote: CUDA is initialised in the notebook since cell [7]",
        ),
        (
            {"world_size": 1, "why_forks_fail": CUDA_IS_INITIALISED, "bytes_on_device": GB},
            "zygote: CUDA is initialised in the notebook",
        ),
        (
            {"world_size": 1, "why_forks_fail": CUDA_IS_INITIALISED, "bytes_on_device": 3 * GB},
            "inline: the names it reads hold 3.0 GB on the device, too much to copy",
        ),
        (
            {"world_size": 2, "why_forks_fail": CUDA_IS_INITIALISED, "bytes_on_device": 3 * GB},
            "zygote: CUDA is initialised in the notebook",
        ),
        (
            {"lacks": "polars has threads in the notebook, which a fork lacks"},
            "zygote: polars has threads in the notebook, which a fork lacks",
        ),
        ({"world_size": 1, "platform_can_fork": False}, "inline: this system cannot fork safely"),
    ],
)
def test_auto_chooses_by_what_the_kernel_holds(facts: dict[str, object], text: str) -> None:
    chosen = start(**facts)
    assert str(chosen) == text
    assert not chosen.is_explicit


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_a_method_that_was_asked_for_is_taken(method: str) -> None:
    assert start(method) == Start(method, "asked for", is_explicit=True)


def test_inline_runs_one_rank() -> None:
    assert start("inline", world_size=1, why_forks_fail=CUDA_IS_INITIALISED).reason == "asked for"
    with pytest.raises(LaunchRefused, match=r"--start inline .* cannot be 2 ranks: use -n 1, or leave --start out"):
        start("inline")


@pytest.mark.parametrize(
    ("why", "begins"),
    [
        (CUDA_IS_INITIALISED, "CUDA is initialised in the notebook"),
        (AUTOGRAD_HAS_THREADS, "Autograd has device threads in the notebook"),
        (DRIVER_IS_IN_USE, "The CUDA driver is in use in the notebook"),
    ],
)
def test_an_insisted_fork_that_would_fail_is_refused_with_the_reason_and_names_the_cell(why: str, begins: str) -> None:
    with pytest.raises(CannotFork) as refused:
        start("fork", why_forks_fail=why, since="cell [7]")
    assert str(refused.value) == (
        f"{begins}, so forked ranks could not train.\n"
        '  First seen: cell [7]. start_method="fork" was asked for; leave it out and the ranks start from a clean\n'
        "  process instead, or restart the kernel."
    )


def test_an_insisted_fork_without_the_threads_of_a_library_is_refused_and_names_it() -> None:
    with pytest.raises(CannotFork, match=r"^polars has threads .*Leave --start fork out, and the ranks start from a"):
        start("fork", lacks="polars has threads in the notebook, which a fork lacks")


def test_an_unknown_culprit_is_not_invented() -> None:
    with pytest.raises(CannotFork, match="First seen: before nbaccel was loaded"):
        start("fork", why_forks_fail=CUDA_IS_INITIALISED)


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_a_system_that_cannot_fork_refuses_what_needs_a_fork(method: str) -> None:
    with pytest.raises(CannotFork, match=f"--start {method} needs a system that can fork"):
        start(method, world_size=1, platform_can_fork=False)


def test_a_system_that_cannot_fork_refuses_several_ranks() -> None:
    with pytest.raises(CannotFork, match=r"2 ranks need a system that can fork.*use -n 1"):
        start(platform_can_fork=False)


def test_an_unknown_start_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LaunchRefused, match="start must be one of auto, fork, zygote, inline; got 'spawn'"):
        start("spawn")


# --- threads


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 2, 1), (16, 2, 8), (2, 4, 1), (7, 2, 3)])
def test_ranks_share_the_cores(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads


def test_ranks_beside_a_tpu_are_refused_unless_the_cpu_is_asked_for() -> None:
    machine = Survey(tpu="/dev/accel0")
    with pytest.raises(NoSuchDevice, match=r"a TPU is here \(/dev/accel0\), which nbaccel does not drive: .* --cpu"):
        choose_devices(2, None, False, machine)
    assert choose_devices(2, None, True, machine).num_processes == 2
