"""What follows when a rank died of memory: the decision, and every word that the user reads. Nothing is started."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from nbaccel.base.events import Checkpoint, Event, LoopEntered, Opened, OutOfMemory, Progress
from nbaccel.base.hardware import Gpu
from nbaccel.base.memory_request import WHAT_HELPS, MemoryRequest
from nbaccel.base.settings import RunSettings
from nbaccel.errors import RankDied
from nbaccel.launching import oom_restart as restarting
from nbaccel.launching.attempts import LaunchAttempt, OomKillWatch, RunRecorder
from nbaccel.launching.diagnosis import diagnose
from nbaccel.launching.ipc.reports import ErrorLink, RankReport
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, ProgramLimit, Start
from nbaccel.launching.kernel_holdings import KernelHolding
from nbaccel.launching.oom_restart import GiveUp, OomRestartPolicy, Restart, wait_for_memory
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.tasks.function_task import FunctionTask

GB = 1_000_000_000
SPEC = LaunchSpec(FunctionTask(print), Devices(2), Start("fork", "a test"), RunSettings(seed=7), oom="shrink")
LOOP = LoopEntered(samples=64, batches_per_step=2)
OOM = ErrorLink("OutOfMemoryError", ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], [])


LINE = ("/tmp/cell.py", 9, "<module>", "accelerator.backward(loss)")


def refused(used: int, asked: int = 64_000_000, limit: int = 510_000_000, place: Any = LINE, **kept: int) -> RankReport:
    """A rank that asked for too much while `used` bytes were in use."""
    demand = MemoryRequest(asked, used, limit, None, **{"parameters_bytes": 80_000_000, **kept})
    text = f"RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate {asked} bytes."
    return failed(ErrorLink("RuntimeError", [text], [place], demand=demand))


def failed(*links: ErrorLink) -> RankReport:
    return RankReport("failed", -1, links=list(links))


def attempt(
    report: RankReport | None = None,
    *events: Event,
    spec: LaunchSpec = SPEC,
    exit_code: int = 1,
    **ended: Any,
) -> LaunchAttempt:
    """Rank 1 of two failed, after `events`."""
    recorder = RunRecorder()
    for event in events:
        recorder.feed(1, 0.0, event)
    how = RankResults(SPEC.task, [None, report], [-signal.SIGTERM, exit_code], [True, False], 1, False, False, 12.0)
    return LaunchAttempt(spec, replace(how, **ended), recorder, OomKillWatch())


def restarted(decision: Restart | GiveUp) -> Restart:
    assert isinstance(decision, Restart), decision
    return decision


def stopped(decision: Restart | GiveUp) -> str:
    assert isinstance(decision, GiveUp), decision
    return decision.report


def test_a_run_that_ran_out_of_memory_starts_again_with_every_batch_in_two_parts() -> None:
    again = restarted(OomRestartPolicy().after(attempt(failed(OOM), LOOP)))
    assert again.line == (
        "rank 1 ran out of memory at 64 per rank; started again with 2 x 32, effective batch 256 unchanged; "
        "the loop's body runs 2 times per batch, each loss weighed as a mean over its samples"
    )
    assert again.spec.settings == RunSettings(seed=7, split=2)


def test_of_ranks_that_share_a_batch_it_is_said_what_each_part_repeats() -> None:
    again = restarted(OomRestartPolicy().after(attempt(failed(OOM), replace(LOOP, sharing_ranks=2, parts=2))))
    said = "the loop's body runs 2 times per batch, and each time does what it counts, draws or averages by itself"
    assert again.line.endswith(said)


def test_each_restart_doubles_the_parts_and_the_sixth_is_not_made() -> None:
    restarting, parts, lines = OomRestartPolicy(), 1, []
    for _ in range(5):
        again = restarted(restarting.after(attempt(failed(OOM), replace(LOOP, parts=parts))))
        parts *= 2
        assert again.spec.settings.split == parts
        lines.append(again.line)
    assert "at 16 x 4 per rank; started again with 32 x 2" in lines[-1]
    report = stopped(restarting.after(attempt(failed(OOM), replace(LOOP, parts=parts))))
    assert report == "rank 1 ran out of memory at 32 x 2 per rank; not started again: it was 5 times already."


def test_a_run_that_cannot_be_started_a_second_time_says_why_and_what_would_follow_elsewhere() -> None:
    spec = replace(SPEC, no_restart="ranks of a second start would see a notebook that has changed since; without --bg")
    report = stopped(OomRestartPolicy().after(attempt(failed(OOM), LOOP, spec=spec)))
    assert report == (
        "rank 1 ran out of memory at 64 per rank; not started again: ranks of a second start would see a notebook that "
        "has changed since; without --bg it would go on with 2 x 32."
    )


def test_batches_without_a_size_are_counted_in_parts() -> None:
    again = restarted(OomRestartPolicy().after(attempt(failed(OOM), LoopEntered())))
    assert "rank 1 ran out of memory; started again with each batch in 2 parts, effective batch unchanged" in again.line


def test_what_the_attempts_left_behind_is_named() -> None:
    restarting = OomRestartPolicy()
    events = [LOOP, Opened("wandb run digits abc"), Checkpoint("runs/checkpoint_0", 10)]
    first = restarted(restarting.after(attempt(failed(OOM), *events, open_files=["/data/log.csv"])))
    assert first.line.endswith(
        "files and trackers the first attempt opened: wandb run digits abc, checkpoint runs/checkpoint_0, /data/log.csv"
    )
    second = restarted(restarting.after(attempt(failed(OOM), LOOP)))
    assert "files and trackers earlier attempts opened: wandb run digits abc, checkpoint" in second.line


def test_a_loop_that_does_not_take_parts_is_not_given_more() -> None:
    spec = replace(SPEC, settings=RunSettings(split=2))
    report = stopped(OomRestartPolicy().after(attempt(failed(OOM), LOOP, spec=spec)))
    assert "not started again: batches of this loop came whole all the same" in report


def test_batch_norm_layers_are_named() -> None:
    names = ["bn1", "layer1.bn", "layer2.bn", "layer3.bn", "head.bn"]
    again = restarted(OomRestartPolicy().after(attempt(failed(OOM), replace(LOOP, batch_norms=names))))
    assert "BatchNorm layers see the samples of one part at a time: bn1, layer1.bn, layer2.bn and 2 more" in again.line


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "no batch of a DataLoader had been handed out"),
        ([replace(LOOP, obstacle="the loop does not train")], "nothing of ours can be cut, since the loop does not"),
        ([LOOP, OutOfMemory(0, "forward", 1, 0, 64)], "forward_backward has cut the batches down to single samples"),
        (
            [LOOP, OutOfMemory(0, "forward", 2, 0, 64), OutOfMemory(0, "optimizer")],
            "forward_backward has cut the batches down to 2 samples already",
        ),
    ],
)
def test_where_nothing_of_ours_can_be_cut_the_reason_is_said(events: list[Event], reason: str) -> None:
    assert reason in stopped(OomRestartPolicy().after(attempt(failed(OOM), *events)))


def test_a_stop_that_was_asked_for_carries_the_same_report() -> None:
    held = [KernelHolding("cuda:0", 3 * GB, 16 * GB, (("model", 2 * GB), ("x", GB)))]
    report = stopped(OomRestartPolicy(lambda: held).after(attempt(failed(OOM), LOOP, spec=replace(SPEC, oom="stop"))))
    assert report == (
        "rank 1 ran out of memory at 64 per rank; not started again: --oom shrink, or oom='shrink' in a launch, would "
        "go on with 2 x 32; the notebook itself holds 3.0 of 16.0 GB on cuda:0 (model 2.0 GB, x 1.0 GB)."
    )


def test_what_the_notebook_holds_is_named_in_the_line_too() -> None:
    held = [KernelHolding("cuda:0", 3 * GB, 16 * GB), KernelHolding("cuda:1", 0, 16 * GB)]
    again = restarted(OomRestartPolicy(lambda: held).after(attempt(failed(OOM), LOOP)))
    assert again.line.endswith("; the notebook itself holds 3.0 of 16.0 GB on cuda:0")


def test_a_device_that_the_notebook_fills_itself_is_no_reason_to_start_again() -> None:
    held = [KernelHolding("cuda:0", 12 * GB, 16 * GB, (("big", 12 * GB),))]
    report = stopped(OomRestartPolicy(lambda: held).after(attempt(failed(OOM), LOOP)))
    assert "smaller batches do not help where the notebook itself holds 75% of the device" in report
    assert "(big 12.0 GB)" in report


def test_more_than_ten_minutes_are_not_thrown_away() -> None:
    report = stopped(OomRestartPolicy().after(attempt(failed(OOM), LOOP, seconds=1500.0)))
    assert "25 minutes of work would be lost, and there is no checkpoint to go on from" in report
    assert "by hand: a batch_size of 32 and twice the accumulation" in report


def test_a_run_that_saves_itself_goes_on_from_its_newest_checkpoint_however_long_it_was() -> None:
    spec = replace(SPEC, settings=RunSettings(checkpoint_every="10min"))
    saved = [Checkpoint("runs/checkpoint_3", 3), Progress(step=3, epochs=5), Checkpoint("runs/checkpoint_4", 4)]
    again = restarted(OomRestartPolicy().after(attempt(failed(OOM), LOOP, *saved, spec=spec, seconds=1500.0)))
    assert "started again from runs/checkpoint_4 with 2 x 32" in again.line
    assert again.spec.settings.resume == "runs/checkpoint_4"


@pytest.mark.parametrize("epochs", [None, 5])
def test_a_program_that_cannot_go_on_in_the_middle_begins_at_its_beginning(epochs: int | None) -> None:
    """It loops over a plain range, or saves by itself for reasons of its own."""
    spec = replace(SPEC, settings=RunSettings(checkpoint_every=None if epochs else "10min"))
    events = [LOOP, Checkpoint("runs/checkpoint_3", 3), Progress(step=3, epochs=epochs)]
    again = restarted(OomRestartPolicy().after(attempt(failed(OOM), *events, spec=spec)))
    assert "started again with 2 x 32" in again.line
    assert again.spec.settings.resume is None


def test_a_time_limit_holds_for_all_attempts_together() -> None:
    again = restarted(OomRestartPolicy().after(attempt(failed(OOM), LOOP, spec=SPEC.ending(timeout_s=60.0))))
    assert again.spec.end.timeout_s == 48.0


def test_what_the_program_had_set_itself_holds_for_all_attempts_too() -> None:
    ended = attempt(failed(OOM), LOOP)
    ended.ended.program_limit = ProgramLimit(at=100.0, seconds=60.0)
    assert restarted(OomRestartPolicy().after(ended)).spec.end.program_limit == ProgramLimit(100.0, 60.0)


def test_a_rank_that_was_killed_starts_again_and_a_guess_is_called_one() -> None:
    decision = OomRestartPolicy().after(attempt(None, LOOP, exit_code=-signal.SIGKILL))
    assert restarted(decision).line.startswith("rank 1 was killed by SIGKILL at 64 per rank (")
    assert "guess" in restarted(decision).line


@pytest.mark.parametrize(("kills", "attempts"), [(0, 1), (2, 5), (None, 5)])
def test_a_rank_that_is_killed_without_a_sign_of_memory_is_tried_again_once(
    kills: int | None, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OomKillWatch, "kills", kills)
    policy, parts = OomRestartPolicy(), 1
    for _ in range(attempts):
        restarted(policy.after(attempt(None, replace(LOOP, parts=parts), exit_code=-signal.SIGKILL)))
        parts *= 2
    report = stopped(policy.after(attempt(None, replace(LOOP, parts=parts), exit_code=-signal.SIGKILL)))
    assert ("it was the same with larger batches, so smaller ones will not help" in report) is (kills == 0)


@pytest.mark.parametrize("exit_code", [-signal.SIGSEGV, -signal.SIGABRT, 3])
def test_other_deaths_are_not_of_memory(exit_code: int) -> None:
    assert stopped(OomRestartPolicy().after(attempt(None, LOOP, exit_code=exit_code))) == ""


def test_a_memory_error_that_was_raised_from_counts_and_one_that_was_merely_handled_does_not() -> None:
    mine = ErrorLink("TrainingFailed", ["TrainingFailed: epoch 3"], [])
    directly = attempt(failed(replace(OOM, relation="which directly caused:"), mine), LOOP)
    assert isinstance(OomRestartPolicy().after(directly), Restart)
    handled = attempt(failed(replace(OOM, relation="and while this was handled:"), mine), LOOP)
    assert stopped(OomRestartPolicy().after(handled)) == ""


@pytest.mark.parametrize(
    "link",
    [
        ErrorLink("RuntimeError", ["RuntimeError: CUDA error: an illegal memory access was encountered"], []),
        replace(OOM, places=[("/site-packages/torch/optim/adam.py", 380, "_multi_tensor_adam", "")]),
    ],
    ids=["sticky", "optimizer"],
)
def test_what_smaller_batches_did_not_change_is_not_tried_again(link: ErrorLink) -> None:
    restarting = OomRestartPolicy()
    assert isinstance(restarting.after(attempt(failed(link), LOOP)), Restart)
    report = stopped(restarting.after(attempt(failed(link), replace(LOOP, parts=2))))
    assert "it was the same with larger batches, so smaller ones will not help" in report


@pytest.mark.parametrize("how", [{"is_interrupted": True}, {"is_timed_out": True}, {"first_failed": None}])
def test_a_run_that_was_stopped_is_over(how: dict[str, Any]) -> None:
    assert stopped(OomRestartPolicy().after(attempt(failed(OOM), LOOP, **how))) == ""


def test_a_rank_that_died_says_why_it_was_not_started_again() -> None:
    dead = attempt(None, exit_code=-signal.SIGKILL)
    report = stopped(OomRestartPolicy().after(dead))
    error = diagnose(dead.ended, False, dead.host, lambda name: None, report)
    assert isinstance(error, RankDied)
    assert "not started again: nothing of ours can be cut" in str(error)


def test_ranks_that_stay_are_not_started_again_and_it_is_said_what_would_be() -> None:
    report = stopped(OomRestartPolicy().after(attempt(failed(OOM), LOOP, spec=SPEC.ending(stays=True))))
    assert report == (
        "rank 1 ran out of memory at 64 per rank; not started again: ranks that stay never are (--oom is for cells "
        "that have ranks of their own: after %accelerate stop this one would go on with 2 x 32)."
    )


@pytest.mark.parametrize("text", ["could not create a primitive", "std::bad_alloc"])
def test_what_libraries_say_of_memory_that_was_full_starts_again(text: str) -> None:
    link = ErrorLink("RuntimeError", [f"RuntimeError: {text}"], [], demand=MemoryRequest(fullness=0.99))
    assert isinstance(OomRestartPolicy().after(attempt(failed(link), LOOP)), Restart)


@pytest.mark.parametrize("demand", [None, MemoryRequest(fullness=0.5), MemoryRequest()])
def test_the_same_words_with_memory_to_spare_are_an_error_of_the_program(demand: MemoryRequest | None) -> None:
    link = ErrorLink("RuntimeError", ["RuntimeError: could not create a primitive"], [], demand=demand)
    assert stopped(OomRestartPolicy().after(attempt(failed(link), LOOP))) == ""


def test_a_request_that_no_batch_makes_room_for_is_made_twice_and_the_sentence_has_its_numbers() -> None:
    restarting = OomRestartPolicy()
    assert isinstance(restarting.after(attempt(refused(480_000_000), LOOP)), Restart)
    report = stopped(restarting.after(attempt(refused(479_000_000), replace(LOOP, parts=2))))
    assert report == (
        "rank 1 ran out of memory at 2 x 32 per rank; not started again: the same 64.0 MB were asked for at the same "
        "line as with 64, and a single sample would not fit either: 479.0 MB were in use (with 64: 480.0 MB), the "
        "limit is 510.0 MB, and one sample needs 542.0 MB. Smaller batches do not help; what does: " + WHAT_HELPS + "."
    )


def test_a_gradient_of_450_mb_that_fits_with_a_quarter_of_the_batch_is_not_given_up() -> None:
    """Twice it is refused at the same line: in the first part of a batch, and in the second, which finds a gradient."""
    loop, sizes = replace(LOOP, samples=1024), {"asked": 450_000_000, "limit": 1_950_000_000}
    restarting = OomRestartPolicy()
    whole = refused(1_510_000_000, **sizes)
    assert isinstance(restarting.after(attempt(whole, loop)), Restart)
    second_part = refused(1_640_000_000, **sizes, gradients_bytes=450_000_000)
    assert isinstance(restarting.after(attempt(second_part, replace(loop, parts=2))), Restart)


@pytest.mark.parametrize(
    "second",
    [
        refused(479_000_000, asked=32_000_000),
        refused(479_000_000, place=("/tmp/cell.py", 3, "<module>", "model(x)")),
        refused(479_000_000, limit=0),
        refused(479_000_000, parameters_bytes=0),
        refused(440_000_000),
    ],
    ids=["another request", "another line", "no limit known", "no model seen", "less in use"],
)
def test_what_may_fit_yet_is_tried(second: RankReport) -> None:
    restarting = OomRestartPolicy()
    assert isinstance(restarting.after(attempt(refused(480_000_000), LOOP)), Restart)
    assert isinstance(restarting.after(attempt(second, replace(LOOP, parts=2))), Restart)


def test_what_exceeds_the_limit_without_any_batch_is_not_tried_again() -> None:
    report = refused(500_000_000, gradients_bytes=300_000_000, states_bytes=160_000_000)
    assert stopped(OomRestartPolicy().after(attempt(report, LOOP))) == (
        "rank 1 ran out of memory at 64 per rank; not started again: parameters (80.0 MB), gradients (300.0 MB), "
        "optimizer states (160.0 MB) and the 64.0 MB that were asked for exceed the limit of 510.0 MB without any "
        "batch. Smaller batches do not help; what does: " + WHAT_HELPS + "."
    )


T4 = Gpu(0, "GPU-a", "Tesla T4", 16 * GB, used_bytes=2 * GB)
OTHER_T4 = Gpu(1, "GPU-b", "Tesla T4", 16 * GB)


def waited(gpus: tuple[Gpu, ...], exit_codes: list[int], *used_bytes: int) -> int:
    """How often GPUs were looked at, of which the first has so much in use, look by look."""
    looks = iter(used_bytes)
    count = 0

    def look() -> list[Gpu]:
        nonlocal count
        count += 1
        return [replace(T4, used_bytes=next(looks)), replace(OTHER_T4, uuid="GPU-of-others", used_bytes=9 * GB)]

    ended = RankResults(SPEC.task, [None, None], exit_codes, [True, False], 1, False, False, 12.0)
    wait_for_memory(gpus, ended, look)
    return count


def test_a_restart_waits_until_the_driver_has_taken_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "_RELEASE_LOOK_S", 0.0)
    killed = [-signal.SIGTERM, -signal.SIGKILL]
    assert waited((T4, OTHER_T4), killed, 12 * GB, 7 * GB, int(2.05 * GB)) == 3
    assert waited((T4,), killed, GB) == 1
    assert waited((T4,), [0, 1]) == 0  # they gave it back themselves
    assert waited((), killed) == 0


def test_a_restart_does_not_wait_for_memory_that_others_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "_LONGEST_RELEASE_S", 0.0)
    monkeypatch.setattr(restarting, "_RELEASE_LOOK_S", 0.0)
    assert waited((T4,), [-signal.SIGKILL, 1], *[12 * GB] * 1000) < 1000
