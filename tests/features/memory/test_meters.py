"""Meters of the host: what they count, and what they allow. Those of a GPU are tested in tests/gpu, too."""

from __future__ import annotations

import resource

import psutil
import pytest
import torch

from nbaccel.base.world import World
from nbaccel.features.memory.meters import CudaMeter, GivenMeter, HostMeter, Meter, make_meter
from nbaccel.testing import MemLimit, run_ranks


def test_the_host_meter_counts_what_exists_and_what_is_made() -> None:
    model = torch.nn.Linear(100, 10, bias=False)
    meter = HostMeter([model], World())
    meter.reset_peak()
    with meter.watch():
        held = torch.ones(1000)
        del held
    assert meter.peak_bytes == 4 * (1000 + 1000)


def test_the_host_meter_refuses_what_the_machine_does_not_have() -> None:
    meter = HostMeter([], World())
    assert meter.limit_bytes is not None
    assert meter.limit_bytes < psutil.virtual_memory().total
    with pytest.raises(torch.OutOfMemoryError), meter.watch():
        torch.empty(meter.limit_bytes + 1, dtype=torch.uint8)  # never touched, so nothing is really taken
    assert meter.source == "80% of the available memory"


def test_ranks_of_one_machine_share_its_memory() -> None:
    alone, two = HostMeter([], World()), HostMeter([], World(0, 2, 0, 2))
    assert alone.limit_bytes is not None
    assert two.limit_bytes == pytest.approx(alone.limit_bytes / 2, rel=0.2)
    assert two.source == "80% of the available memory, divided among 2 ranks"


def test_a_limit_of_the_process_is_known() -> None:
    def limited() -> tuple[int | None, str]:
        used = psutil.Process().memory_info().data
        resource.setrlimit(resource.RLIMIT_DATA, (used + 50_000_000, resource.RLIM_INFINITY))
        meter = HostMeter([], World())
        return meter.limit_bytes, meter.source

    ((limit_bytes, source),) = run_ranks(1, limited)
    assert limit_bytes == pytest.approx(45_000_000, rel=0.1)
    assert source == "90% of what RLIMIT_DATA leaves"


def test_a_gauge_of_the_program_is_believed() -> None:
    with MemLimit(5000) as memory:
        meter = GivenMeter(memory)
        meter.reset_peak()
        held = torch.ones(100)
        del held
        assert (meter.limit_bytes, meter.peak_bytes) == (5000, 400)


def test_a_device_that_nobody_measures_says_so() -> None:
    meter = make_meter(torch.device("mps"), [], World())
    assert type(meter) is Meter
    assert (meter.limit_bytes, meter.peak_bytes) == (None, None)


def test_the_host_is_measured_on_the_cpu() -> None:
    assert isinstance(make_meter(torch.device("cpu"), [], World()), HostMeter)


def _card(monkeypatch: pytest.MonkeyPatch, total: int) -> dict[str, int]:
    """A GPU of `total` bytes, of which this process's allocator and what is beside it (kernels, handles) hold some."""
    held = {"reserved": 0, "beside": 300}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - held["reserved"] - held["beside"], total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held["reserved"])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    return held


def test_what_the_first_step_takes_beside_the_allocator_is_not_counted_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    held = _card(monkeypatch, 10_000)
    meter = CudaMeter(torch.device("cuda", 0))
    assert meter.limit_bytes == 9_700
    with meter.watch():
        held.update(reserved=4_000, beside=700)
    assert meter.limit_bytes == 9_300
    with pytest.raises(torch.OutOfMemoryError), meter.watch():
        held.update(beside=800)
        raise torch.OutOfMemoryError
    assert meter.limit_bytes == 9_200


def test_a_device_that_failed_in_a_trial_hides_no_error_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, 10_000)
    meter = CudaMeter(torch.device("cuda", 0))

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(ValueError, match="of the trial"), meter.watch():
        monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
        raise ValueError("of the trial")
    assert meter.limit_bytes == 9_700
