"""A run that hangs ends when it was told to, and says which rank holds it up and on which line."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import inspect
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.errors import RanksFailed
from nbaccel.launching.api import launch
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.user_code import ASK
from nbaccel.launching.processes import hangs, standstill
from nbaccel.launching.processes.asked_stacks import Question, Stack
from nbaccel.launching.processes.handle import WorkerHandle
from nbaccel.launching.processes.hangs import HangWatch
from nbaccel.train.distributed import transport


def turns_for_ever_on_rank_1() -> None:
    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=True)
    while accelerator.process_index == 1:
        pass
    accelerator.wait_for_everyone()


def sleeps_in_c_on_rank_0() -> None:
    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 0:
        time.sleep(1000)
    accelerator.wait_for_everyone()


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "rank", "line"),
    [
        (turns_for_ever_on_rank_1, 1, r"in turns_for_ever_on_rank_1: (while accelerator.process_index == 1:|pass)"),
        (sleeps_in_c_on_rank_0, 0, r"in sleeps_in_c_on_rank_0: time.sleep\(1000\)"),
    ],
)
def test_a_hang_ends_with_the_guilty_rank_and_its_line(
    function: Callable[[], None], rank: int, line: str, start_method: str
) -> None:
    with pytest.raises(RanksFailed, match=rf"for \d s; rank {rank} seems to hold up the others:") as caught:
        launch(function, 2, hang_timeout_s=3.0, start_method=start_method, cpu=True)  # longer than imports
    assert caught.value.rank == rank
    text = str(caught.value)
    assert re.search(rf"  rank {rank}: .*test_hangs.py, line \d+, {line}( \(inside .*\))?$", text, re.MULTILINE), text
    waiting = rf"  rank {1 - rank}: .*: accelerator.wait_for_everyone\(\) \(inside \w+ of transport.py\)$"
    assert re.search(waiting, text, re.MULTILINE), text


def loads_from_a_worker(what_it_does: str) -> None:
    """Rank 1's loader has a worker that comes to grief at its third sample."""

    from nbaccel import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    class Samples(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            if rank == 1 and index == 3:
                os.kill(os.getpid(), signal.SIGKILL) if what_it_does == "dies" else time.sleep(1000)
            return index

    for _ in torch.utils.data.DataLoader(Samples(), 1, num_workers=1):
        accelerator.wait_for_everyone()


@pytest.mark.slow
def test_a_worker_of_a_loader_that_died_ends_the_run_and_its_rank_is_named(start_method: str) -> None:
    with pytest.raises((RuntimeError, OSError, EOFError)) as caught:  # as torch hears of it: at once, or by its socket
        launch(loads_from_a_worker, 2, ("dies",), start_method=start_method, cpu=True, hang_timeout_s=20.0)
    notes = "\n".join(caught.value.__notes__)
    assert "raised on rank 1 of 2" in notes, notes
    assert re.search(r"\nA DataLoader worker of this rank \(process \d+\) was killed by SIGKILL: ", notes), notes


@pytest.mark.slow
def test_a_rank_that_waits_for_a_worker_of_its_loader_is_a_hang_with_the_line_of_its_loop() -> None:
    with pytest.raises(RanksFailed, match="rank 1 seems to hold up the others") as caught:
        launch(loads_from_a_worker, 2, ("sleeps",), start_method="fork", cpu=True, hang_timeout_s=1.0)
    where = r"  rank 1: .*test_hangs.py, line \d+, in loads_from_a_worker: for _ in torch.utils.data.DataLoader\("
    assert re.search(where, str(caught.value)), str(caught.value)


@pytest.mark.slow
def test_ranks_that_get_on_are_no_hang() -> None:
    def steps() -> int:
        from nbaccel import Accelerator

        accelerator = Accelerator(cpu=True)
        for _ in range(6):
            time.sleep(0.4)
            accelerator.wait_for_everyone()
        return 1

    assert launch(steps, 2, hang_timeout_s=1.5, cpu=True, start_method="fork").values == [1, 1]


# --- what programs do to signals ----------------------------------------------------------------------------------

ALL = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


def sets_every_signal_anew() -> None:
    """As Lightning's `fit` does: faulthandler's handlers are none that Python knows of, and are lost."""
    for number in ALL:
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)


def gives_every_signal_its_default() -> None:
    for number in ALL:
        signal.signal(number, signal.SIG_DFL)


def ignores_every_signal() -> None:
    for number in ALL:
        signal.signal(number, signal.SIG_IGN)


def blocks_every_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL)


def writes_stacks_elsewhere() -> None:
    faulthandler.enable()
    faulthandler.register(ASK, file=open(os.devnull, "w"))  # noqa: SIM115  # for as long as it may be asked


def unregisters_what_it_did_not_register() -> None:
    faulthandler.unregister(ASK)
    faulthandler.disable()


def handles_the_signal_itself() -> None:
    def interrupted(number: int, frame: object) -> None:
        raise InterruptedError("a signal that nobody sent")

    signal.signal(ASK, interrupted)


MISUSES = [
    sets_every_signal_anew,
    gives_every_signal_its_default,
    ignores_every_signal,
    blocks_every_signal,
    writes_stacks_elsewhere,
    unregisters_what_it_did_not_register,
    handles_the_signal_itself,
]


def waits_for_ever() -> None:
    threading.Event().wait()


def each_rank_changes_its_signals_and_waits() -> None:
    MISUSES[int(os.environ["RANK"])]()
    waits_for_ever()


@pytest.mark.slow
def test_a_rank_is_asked_where_it_is_whatever_its_program_does_to_signals_and_survives_the_question() -> None:
    with pytest.raises(RanksFailed, match="seems to hold up the others") as caught:
        launch(each_rank_changes_its_signals_and_waits, len(MISUSES), hang_timeout_s=1.0, start_method="fork", cpu=True)
    lines = str(caught.value).splitlines()[1 : len(MISUSES) + 1]
    line = r"  rank {}: .*test_hangs.py, line \d+, in waits_for_ever: threading.Event\(\).wait\(\) \(inside \w+ of .*\)"
    for rank, (misuse, told) in enumerate(zip(MISUSES, lines, strict=True)):
        assert re.fullmatch(line.format(rank), told), f"{misuse.__name__}: {told}"


def keeps_the_lock_in_c(misuse: Callable[[], None] | None) -> None:
    """Wait for what never comes, in C code that lets no other thread of Python run."""
    if misuse is not None:
        misuse()
    end, _ = os.pipe()
    ctypes.PyDLL(None).read(end, ctypes.create_string_buffer(1), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (None, r".*test_hangs.py, line \d+, in keeps_the_lock_in_c: ctypes.PyDLL\(None\).read\(.*"),
        *(
            (misuse, "does not answer: it is stopped, .* or is in C code that lets no Python run")
            for misuse in MISUSES[:4]
        ),
    ],
)
def test_a_rank_in_c_code_answers_by_the_signal_where_that_can_be_and_is_never_ended_by_it(
    misuse: Callable[[], None] | None, words: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        launch(keeps_the_lock_in_c, 1, (misuse,), hang_timeout_s=0.5, start_method="fork", cpu=True)
    assert re.fullmatch(f"  rank 0: {words}", str(caught.value).splitlines()[1]), str(caught.value)


def fits_with_lightning_and_goes_on_working(seconds: float) -> str:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    warnings.simplefilter("ignore")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", devices=2, enable_model_summary=False, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 1), 2))
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 0:
        time.sleep(seconds)  # it plots, evaluates, or writes a file
    accelerator.wait_for_everyone()
    return "worked to its end"


@pytest.mark.full
@pytest.mark.slow
def test_long_work_after_lightning_s_fit_is_noticed_and_ends_as_it_would(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed; `make test` installs it")
    monkeypatch.setattr(hangs, "_NOTICE_S", 1.0)
    run = launch(fits_with_lightning_and_goes_on_working, 2, (4.0,), start_method="fork", cpu=True)
    assert run.values == ["worked to its end"] * 2
    assert "in fits_with_lightning_and_goes_on_working: time.sleep(seconds)" in capfd.readouterr().err


def waits_for_nobody(seconds: float) -> str:
    time.sleep(seconds)  # as for a thread that a fork lacks
    return "woken"


def computes(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "done"


@pytest.mark.slow
def test_ranks_that_all_wait_before_their_first_step_are_noticed_and_ranks_that_compute_are_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hangs, "_NOTICE_S", 1.5)
    monkeypatch.setattr(hangs, "_CERTAIN_S", 1.0)
    run = launch(waits_for_nobody, 2, (4.0,), start_method="fork", cpu=True)
    assert run.values == ["woken"] * 2
    said = capfd.readouterr().err
    assert re.search(r"no rank has entered a step or a collective for \d+ s, and none computes:", said)
    assert said.count("in waits_for_nobody: time.sleep(seconds)") == 2
    monkeypatch.setattr(standstill, "_IDLE", 0.0)  # on a machine whose cores are all busy a rank computes little
    launch(computes, 1, (3.0,), start_method="fork", cpu=True)
    assert "none computes" not in capfd.readouterr().err


def stops_on_numbers_of_its_own(how: str = "break") -> None:
    """As with early stopping, where each rank looks at its own loss; no call of ours precedes the backward."""
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    for step in range(9):
        model(torch.ones(1, 2)).sum().backward()
        if step == 3 and torch.distributed.get_rank() == 1:
            if how == "raises":
                raise KeyboardInterrupt
            if how == "gets SIGINT":
                os.kill(os.getpid(), signal.SIGINT)
            break


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "zygote"])
def test_ranks_that_wait_for_one_that_has_left_the_loop_are_ended_with_a_sentence(
    start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "_CERTAIN_S", 2.0)
    with pytest.raises(RanksFailed) as caught:
        launch(stops_on_numbers_of_its_own, 2, start_method=start_method, cpu=True)
    said = str(caught.value)
    assert said.startswith("rank 1 has come to its end, and the others have waited for it in a collective for")
    assert "in stops_on_numbers_of_its_own: " in said
    assert "rank 1: has finished" in said
    assert 'accelerator.reduce(loss, "mean")' in said
    assert "hang timeout" not in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "gets SIGINT"])
def test_ranks_that_wait_for_one_that_an_interrupt_has_ended_are_ended_with_a_sentence(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "_CERTAIN_S", 2.0)
    with pytest.raises(RanksFailed) as caught:
        launch(stops_on_numbers_of_its_own, 2, (how,), cpu=True, timeout_s=60)
    said = str(caught.value)
    assert caught.value.rank == 1
    assert said.startswith("rank 1 was ended by a KeyboardInterrupt, and the others have waited for it in a collective")
    assert "in stops_on_numbers_of_its_own: " in said
    assert "rank 1: was interrupted" in said
    assert "ends that rank alone" in said


ALONE: dict[str, Callable[[Accelerator, Any], Any]] = {
    "model(torch.ones(2, 4))": lambda accelerator, model: model(torch.ones(2, 4)),
    "model[0].weight.full_tensor()": lambda accelerator, model: model[0].weight.full_tensor(),
    "model[0].weight.norm().item()": lambda accelerator, model: model[0].weight.norm().item(),
    "sum(p.norm() for p in model.parameters())": lambda accelerator, model: sum(p.norm() for p in model.parameters()),
    "accelerator.clip_grad_norm_(model.parameters(), 1.0)": lambda accelerator, model: accelerator.clip_grad_norm_(
        model.parameters(), 1.0
    ),
    "accelerator.get_state_dict(model)": lambda accelerator, model: accelerator.get_state_dict(model),
    'accelerator.save_state("checkpoint")': lambda accelerator, model: accelerator.save_state("checkpoint"),
}


def calls_on_rank_0_alone(what: str) -> None:
    accelerator = Accelerator(strategy="fsdp")
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    accelerator.backward(model(torch.ones(2, 4)).mean())
    if accelerator.is_main_process:
        ALONE[what](accelerator, model)
    accelerator.wait_for_everyone()


@pytest.mark.slow
@pytest.mark.parametrize("what", ALONE)
def test_a_call_of_a_sharded_model_on_one_rank_ends_with_the_lines_of_all(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hangs, "_CERTAIN_S", 2.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RanksFailed) as caught:
        launch(calls_on_rank_0_alone, 2, (what,), cpu=True)
    said = str(caught.value)
    assert said.startswith("rank 0 waits in a sharded model for ranks that wait in another call, for ")
    assert re.search(rf"rank 0: .*{re.escape(what.partition('(')[0])}", said)
    assert re.search(r"rank 1: .*accelerator\.wait_for_everyone\(\)", said)
    assert "outside of `if accelerator.is_main_process`" in said
    assert "hang timeout" not in said


def reads_on_rank_0_alone_while_the_other_trains(what: str) -> None:
    accelerator = Accelerator(strategy="fsdp")
    net = torch.nn.Sequential(torch.nn.Linear(4, 96), torch.nn.Linear(96, 96), torch.nn.Linear(96, 4))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        if step == 1 and accelerator.is_main_process:
            ALONE[what](accelerator, model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("what", [name for name in ALONE if not name.startswith("model(")])
def test_what_one_rank_reads_while_the_other_trains_does_not_meet_its_step(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one process group gloo would take rows of one for those of the other, or end a rank by SIGABRT."""
    monkeypatch.setattr(hangs, "_CERTAIN_S", 2.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RanksFailed) as caught:
        launch(reads_on_rank_0_alone_while_the_other_trains, 2, (what,), cpu=True, timeout_s=60)
    said = str(caught.value)
    assert "waits in a sharded model for ranks that wait in another call" in said
    assert re.search(rf"rank 0: .*{re.escape(what.partition('(')[0])}", said)
    assert re.search(r"rank 1: .*in reads_on_rank_0_alone_while_the_other_trains: ", said)


def evaluates_on_rank_0_alone(mode: str) -> None:
    accelerator = Accelerator(strategy="fsdp")
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        model.train()
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            optimizer.zero_grad()
        model.train(mode == "train")
        if accelerator.is_main_process:
            with torch.no_grad():
                model(torch.ones(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_one_evaluation_on_one_rank_between_epochs_ends_with_the_lines_of_all(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks exchange rows of an evaluation for those of a training step, until a gather meets a sum."""
    monkeypatch.setattr(hangs, "_CERTAIN_S", 2.0)
    with pytest.raises(RanksFailed) as caught:
        launch(evaluates_on_rank_0_alone, 2, (mode,), cpu=True)
    said = str(caught.value)
    assert "waits in a sharded model for ranks that wait in another call" in said
    if mode == "eval":
        assert re.search(r"rank 0: .*in evaluates_on_rank_0_alone: model\(torch\.ones\(1, 4\)\)", said)
    assert re.search(r"rank 1: .*in evaluates_on_rank_0_alone: accelerator\.backward", said)


def works_longer_than_the_other(in_what_way: str) -> str:
    if os.environ["RANK"] == "0":
        ends = time.monotonic() + 5.0
        weight = torch.ones(300, 300, requires_grad=True)
        while time.monotonic() < ends:
            if in_what_way == "sleeping":
                time.sleep(0.1)
            else:
                (weight @ weight).sum().backward()
    return "worked to its end"


@pytest.mark.slow
@pytest.mark.parametrize("in_what_way", ["computing", "sleeping"])
def test_a_rank_that_works_longer_than_the_others_comes_to_its_end(
    in_what_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "_CERTAIN_S", 1.0)
    assert launch(works_longer_than_the_other, 2, (in_what_way,), cpu=True).values == ["worked to its end"] * 2


def leaves_a_backward_by_an_alarm() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    if accelerator.process_index == 1:  # an alarm during its data, say, whose exception the program catches
        accelerator.gather(torch.ones(100))
    accelerator.backward(model(torch.ones(1, 2)).sum())


@pytest.mark.slow
def test_ranks_that_wait_in_different_calls_are_ended_with_the_lines_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "_CERTAIN_S", 1.0)
    with pytest.raises(RanksFailed, match=r"out of step: they wait in different calls, for \d s") as caught:
        launch(leaves_a_backward_by_an_alarm, 2, cpu=True)
    assert "accelerator.gather(torch.ones(100))" in str(caught.value)
    assert "accelerator.backward(model(" in str(caught.value)


def test_a_rank_that_gets_no_processor_on_a_busy_machine_is_not_taken_for_one_that_waits(
    page: ControlPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Stack([(transport.__file__, 143, "_wait_on_host"), ("/tmp/train.py", 9, "<module>")])
    training = Stack([("/torch/graph.py", 979, "_engine_run_backward"), ("/tmp/train.py", 8, "<module>")])
    answers = {0: waiting, 1: training}
    monkeypatch.setattr(Question, "answers", lambda self: answers)
    monkeypatch.setattr(standstill, "_seconds_used", lambda member: 0.0)
    wants = True
    monkeypatch.setattr(standstill, "_wants_a_processor", lambda member: wants)
    watch, _, told = watched(page, tmp_path)
    for now in (1.0, 7.0, 11.5, 12.5):
        assert watch.tick(now) is None
    wants = False
    assert watch.tick(17.0) is None
    assert watch.tick(21.8) is None  # the question
    found = watch.tick(24.0) or watch.tick(26.0)
    assert found is not None
    assert found.is_elsewhere
    assert not told


def test_a_collective_of_ours_is_known_by_the_file_in_which_its_rank_waits() -> None:
    waiting = Stack([(transport.__file__, 143, "_wait_on_host"), ("/tmp/train.py", 9, "<module>")])
    assert waiting.waits
    assert waiting.is_in_collective
    training = Stack([(inspect.getfile(Accelerator), 1, "backward"), ("/tmp/train.py", 9, "<module>")])
    assert not training.waits
    assert not training.is_in_collective


@pytest.mark.parametrize(("caller", "waits"), [("_functional_collectives.py", True), ("tensor/_dispatch.py", False)])
def test_who_calls_an_operator_says_whether_it_is_a_collective(caller: str, waits: bool) -> None:
    torchs = str(Path(torch.__file__).parent)
    operator = [(f"{torchs}/_ops.py", 882, "redispatch"), (f"{torchs}/_library/autograd.py", 41, "forward_no_grad")]
    stack = Stack([*operator, (f"{torchs}/distributed/{caller}", 142, "f"), ("/tmp/train.py", 9, "<module>")])
    assert stack.is_in_collective is waits
    assert stack.call == (("/tmp/train.py", 9), "f")
    assert not Stack([]).is_in_collective


@dataclass
class FakeProcess:
    pid: int = 0
    signals: list[int] = field(default_factory=list)

    def signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(2)
    yield page
    page.close()


def watched(
    page: ControlPage, folder: Path, limit_s: float | None = None, ends_waiting: bool = False
) -> tuple[HangWatch, list[WorkerHandle], list[str]]:
    members = [WorkerHandle(rank, FakeProcess(), None) for rank in range(2)]  # type: ignore[arg-type]
    told: list[str] = []
    watch = HangWatch(page, members, str(folder / "store"), limit_s, told.append, 0.0, ends_waiting)
    return watch, members, told


@pytest.fixture
def stacks() -> Iterator[None]:
    """This process has a handler, as a rank."""
    faulthandler.register(ASK, file=sys.stderr)
    yield
    faulthandler.unregister(ASK)


def test_a_rank_that_others_are_ahead_of_is_named_once_after_half_a_minute(page: ControlPage, tmp_path: Path) -> None:
    watch, _, told = watched(page, tmp_path)
    page.count_collectives(0, 7)
    for now in (1.0, 30.9, 31.1, 31.8, 60.0, 90.0):
        assert watch.tick(now) is None
    (line,) = told
    assert line.startswith("no rank has entered a step or a collective for 31 s; rank 1 seems to hold up the others:")


@pytest.mark.parametrize(
    ("other", "is_dry", "ends"),
    [("torch/distributed/distributed_c10d.py", True, True), ("train.py", True, False), ("", False, False)],
)
def test_a_dry_run_whose_gpu_waits_for_a_peer_ends_though_its_processor_is_busy(
    page: ControlPage, tmp_path: Path, other: str, is_dry: bool, ends: bool
) -> None:
    watch, _, _ = watched(page, tmp_path, ends_waiting=is_dry)
    page.count_collectives(0, 7)
    assert watch.tick(0.0) is None
    assert watch.tick(31.0) is None
    places = ["/torch/cuda/__init__.py", f"/{other}"]
    for rank, place in enumerate(places):
        text = f'main 0x01\nThread 0x01 (most):\n  File "{place}", line 7 in synchronize\n\n'
        (tmp_path / f"stacks-{rank}").write_text(text)
    hang = watch.tick(31.7)
    assert (hang is not None) is ends
    if hang is not None:
        assert hang.rank == 1, "it has entered fewer collectives"
        assert str(hang).startswith("no rank has entered a step or a collective for 32 s; rank 1 seems to hold up")


def test_a_rank_that_makes_calls_of_a_map_does_not_hang_and_fewer_calls_are_no_ones_fault(
    page: ControlPage, tmp_path: Path
) -> None:
    watch, _, told = watched(page, tmp_path, limit_s=50.0)
    for done, now in enumerate((1.0, 40.0, 80.0, 120.0)):
        page.count_calls(0, done)
        assert watch.tick(now) is None
    for now in (151.0, 152.0):  # a long call is not worth a word, and a hang only where the user said so
        assert watch.tick(now) is None
    assert not told
    watch.tick(170.0)
    assert watch.tick(171.0) is not None


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_signal_is_for_ranks_that_did_not_answer_otherwise_and_can_take_it(
    page: ControlPage, tmp_path: Path, stacks: None, is_blocked: bool
) -> None:
    """Rank 0 has a handler; rank 1 has ended, as far as one can see."""
    watch, members, _ = watched(page, tmp_path, limit_s=5.0)
    (tmp_path / "stacks-0").write_text("main 0x01\n")
    members[0].process.pid = os.getpid()
    watch.tick(0.0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK} if is_blocked else set())
    try:
        assert watch.tick(6.0) is None
        assert signals_of(members) == [[], []]
        hang = watch.tick(6.7)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASK})
    assert signals_of(members) == ([[], []] if is_blocked else [[ASK], []])
    assert (hang is None) is not is_blocked
    assert watch.due_in(6.7) == (None if is_blocked else pytest.approx(0.6))
    assert is_blocked or watch.tick(7.4) is not None


def test_a_rank_that_has_answered_gets_no_signal(page: ControlPage, tmp_path: Path, stacks: None) -> None:
    watch, members, _ = watched(page, tmp_path, limit_s=5.0)
    (tmp_path / "stacks-0").write_text("main 0x01\n")
    members[0].process.pid = os.getpid()
    watch.tick(0.0)
    watch.tick(6.0)
    (tmp_path / "stacks-0").write_text('main 0x01\nThread 0x01 (most):\n  File "train.py", line 7 in train\n\n')
    hang = watch.tick(6.7)
    assert signals_of(members) == [[], []]
    assert hang is not None
    assert hang.lines[0] == "rank 0: train.py, line 7, in train"


def test_an_old_answer_is_not_taken_for_a_new_one(page: ControlPage, tmp_path: Path) -> None:
    (tmp_path / "stacks-0").write_text('main 0x01\nThread 0x01 (most):\n  File "train.py", line 7 in train\n\n')
    watch, _, _ = watched(page, tmp_path, limit_s=5.0)
    watch.tick(0.0)
    watch.tick(6.0)
    hang = watch.tick(6.7)
    assert hang is not None
    assert hang.lines[0].startswith("rank 0: does not answer: ")


def signals_of(members: list[WorkerHandle]) -> list[list[int]]:
    return [member.process.signals for member in members]  # type: ignore[attr-defined]


def test_a_long_computation_on_all_ranks_is_no_news(page: ControlPage, tmp_path: Path) -> None:
    watch, _, told = watched(page, tmp_path)
    assert [watch.tick(now) for now in (1.0, 32.0, 33.0, 90.0, 95.0)] == [None] * 5
    assert told == []


def test_whoever_gets_on_starts_the_clock_anew(page: ControlPage, tmp_path: Path) -> None:
    watch, _, _ = watched(page, tmp_path, limit_s=5.0)
    watch.tick(0.0)
    for now in range(1, 30):
        page.count_collectives(1, now)
        assert watch.tick(float(now)) is None
    assert watch.tick(34.5) is None  # asks
    hang = watch.tick(35.2)
    assert hang is not None
    assert hang.rank == 0
    silent = "does not answer: it is stopped, has just begun, or is in C code that lets no Python run"
    assert str(hang).endswith(f"\n  rank 0: {silent}\n  rank 1: {silent}")
