"""Runs that really run out of memory: they end with the parameters of a run that fits, or say why not."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.errors import CannotCut, RankDied, StepCorrupted
from nbaccel.launchers import notebook_launcher
from nbaccel.launching.api import Run, launch
from nbaccel.testing import Faults, MemLimit

LIMIT_BYTES = 40_000
"""Enough for the training below with 16 samples per part, not with 32."""


@dataclass
class Training:
    """An ordinary training whose last rank has a small device.

    ends: "raise" (the error leaves the function) or "kill" (SIGKILL where memory would run out).
    """

    limit_bytes: int | None = None
    ends: str = "raise"
    is_plain: bool = False
    is_prepared: bool = True
    backward: str = "accelerator"
    project_dir: str | None = None

    def __call__(self) -> list[torch.Tensor]:
        from torch.utils.data import DataLoader, TensorDataset

        from nbaccel import Accelerator

        torch.manual_seed(0)
        accelerator = Accelerator(log_with="jsonl" if self.project_dir else None, project_dir=self.project_dir)
        if self.project_dir:
            accelerator.init_trackers("digits")
        net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        # With the default, 1e-8, a small gradient's rounding is divided by that gradient: 4e-6 was seen, with AVX-512.
        adam = torch.optim.AdamW(net.parameters(), lr=0.01, eps=0.01)
        data: Any = DataLoader(TensorDataset(torch.randn(150, 8), torch.randn(150)), 64, shuffle=True)
        model, optimizer = accelerator.prepare(net, adam)
        loader = accelerator.prepare(data) if self.is_prepared else data
        scheduler = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.1, total_iters=2 * len(loader))
        limits = self.limit_bytes if accelerator.is_last_process else None
        with MemLimit(limits):
            for _ in range(2):
                for x, y in loader:
                    try:
                        with accelerator.accumulate(model):
                            loss = (model(x)[:, 0] - y).square().mean()
                            accelerator.backward(loss) if self.backward == "accelerator" else loss.backward()
                            optimizer.step()
                            scheduler.step()
                            optimizer.zero_grad()
                    except torch.OutOfMemoryError:
                        if self.ends == "kill":
                            os.kill(os.getpid(), signal.SIGKILL)
                        raise
        return [parameter.detach() for parameter in net.parameters()]


SMALL = Training(LIMIT_BYTES)


def shrunk(training: Training, ranks: int, **options: Any) -> Run:
    return launch(training, ranks, seed=5, oom="shrink", **options)


@pytest.fixture(scope="module")
def fitting() -> dict[int, list[torch.Tensor]]:
    """What a run that fits has trained, by the number of ranks."""
    return {ranks: launch(Training(), ranks, seed=5).value for ranks in (1, 2)}


def assert_trained(run: Run, expected: list[torch.Tensor]) -> None:
    for value in run.values:
        for mine, theirs in zip(value, expected, strict=True):
            assert (mine - theirs).abs().max() <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ends", "start_method"),
    [(1, "raise", "fork"), (2, "raise", "zygote"), (1, "kill", "zygote"), (2, "kill", "fork")],
)
def test_c26_a_rank_that_dies_of_memory_ends_with_the_parameters_of_a_run_that_fits(
    ranks: int,
    ends: str,
    start_method: str,
    fitting: dict[int, list[torch.Tensor]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With a count of such kills that did not rise, a second one would end the run.
    monkeypatch.setattr("nbaccel.launching.attempts.out_of_memory_kills", lambda root: None)
    run = shrunk(replace(SMALL, ends=ends), ranks, start_method=start_method)
    assert_trained(run, fitting[ranks])
    assert len(run.restarts) == 2
    how = "was killed by SIGKILL at 64 per rank" if ends == "kill" else "ran out of memory at 64 per rank"
    assert run.restarts[0].startswith(f"rank {ranks - 1} {how}")
    assert f"started again with 2 x 32, effective batch {64 * ranks} unchanged" in run.restarts[0]
    assert "started again with 4 x 16" in run.restarts[1]
    assert capfd.readouterr().err.count("started again with") == 2  # each was said once


@pytest.mark.slow
def test_functions_are_not_started_again_unless_they_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        notebook_launcher(SMALL, num_processes=2)
    assert (
        "rank 1 ran out of memory at 64 per rank; not started again: --oom shrink, or oom='shrink' in a launch"
        in (caught.value.__notes__[-1])
    )
    assert "not started again" in str(caught.value.__cause__)  # plain Python shows it, too
    waits: list[object] = []
    monkeypatch.setattr("nbaccel.launching.diagnosis.wait_for_memory", lambda gpus, ended, look: waits.append(gpus))
    assert notebook_launcher(SMALL, num_processes=2, oom="shrink") is not None
    assert waits  # before each restart
    assert set(waits) == {()}  # no GPU


@pytest.mark.slow
def test_c26_a_run_for_which_no_batch_is_small_enough_is_started_again_once() -> None:
    run = shrunk(replace(SMALL, limit_bytes=9_000), 2, check=False)
    assert len(run.restarts) == 1
    assert isinstance(run.error, torch.OutOfMemoryError)
    assert "not started again: the same" in run.error.__notes__[-1]


@pytest.mark.slow
def test_where_nothing_of_ours_can_be_cut_there_is_no_restart() -> None:
    run = shrunk(replace(SMALL, is_prepared=False), 2, check=False)
    assert run.restarts == []
    assert isinstance(run.error, torch.OutOfMemoryError)
    assert "nothing of ours can be cut, since no batch of a DataLoader" in run.error.__notes__[-1]


@pytest.mark.slow
def test_a_killed_rank_without_a_loop_of_ours_is_not_started_again() -> None:
    with pytest.raises(RankDied, match=r"was killed by SIGKILL \(signal 9\)(.|\n)*not started again: nothing of ours"):
        launch(_dies, 2, oom="shrink")


def _dies() -> None:
    with Faults().kill_at("start", rank=1) as faults:
        faults.at("start")
        signal.pause()


@pytest.mark.slow
def test_a_loop_that_goes_past_the_accelerator_is_refused_when_it_is_cut() -> None:
    run = shrunk(replace(SMALL, backward="its own"), 1, check=False)
    assert len(run.restarts) == 1
    assert isinstance(run.error, CannotCut)
    assert "accelerator.backward(loss)" in str(run.error)


@pytest.mark.slow
def test_trackers_that_the_first_attempt_opened_are_named(tmp_path: Path) -> None:
    run = shrunk(replace(SMALL, project_dir=str(tmp_path)), 1)
    place = tmp_path / "digits" / "metrics.jsonl"
    assert f"the first attempt opened: jsonl run digits metrics.jsonl in {tmp_path}, {place}" in run.restarts[0]


@pytest.mark.slow
def test_memory_that_the_host_refuses_is_memory_that_ran_out() -> None:
    """Under RLIMIT_DATA, by CPython or by torch's own allocator: no emulation."""

    def train() -> int:
        from torch.utils.data import DataLoader

        from nbaccel import Accelerator

        # 64 samples take 256 MiB and 32 take 128, beside 32 of everything else. With room for 256 a thread's stack or a
        # tensor of an earlier test that goes meanwhile, 8 MiB, made the difference.
        limit = 192 << 20
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit, resource.RLIM_INFINITY))
        accelerator = Accelerator()
        net = torch.nn.Linear(1, 1 << 20)
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader([torch.ones(1)] * 64, 64)
        )
        bodies = 0
        for x in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            bodies += 1
        return bodies

    # A fork would have the holes in the memory of all tests before, into which 256 MiB may fit.
    run = launch(train, 1, oom="shrink", cpu=True, start_method="zygote")
    assert len(run.restarts) == 1
    assert run.value == 2


def test_an_oom_that_is_none_of_the_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="oom must be one of 'shrink', 'stop', got 'grow'"):
        launch(print, 1, oom="grow")


def _torn_step() -> None:
    """Two good steps; then rank 1's optimizer moves its state, and has no memory left for the update itself."""
    from nbaccel import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(32, 32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=True))
    for step in range(3):
        accelerator.forward_backward(lambda x: model(x).square().mean(), torch.ones(4, 32))
        with MemLimit(100 if step == 2 and accelerator.process_index == 1 else None):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("oom", ["stop", "shrink"])
def test_c20_a_torn_step_on_one_rank_is_that_error_of_the_launch_within_seconds(start_method: str, oom: str) -> None:
    launch(int, 1, start_method=start_method)  # what is started once is started
    began = time.monotonic()
    with pytest.raises(StepCorrupted, match="ran out of memory in step 2 on rank 1 of 2"):
        launch(_torn_step, 2, start_method=start_method, oom=oom)
    assert time.monotonic() - began < 15
