"""`notebook_launcher` with one process: the function is called where it is, as in Accelerate."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.base.events import StepEntered, StepsEnded, emit
from nbaccel.base.hardware import Gpu, Survey
from nbaccel.errors import LaunchRefused, NestedLaunch
from nbaccel.features.accelerate_helpers import launches_as_accelerate as ours
from nbaccel.features.other_libraries import transformers
from nbaccel.launchers import notebook_launcher
from nbaccel.launching import api, inline
from nbaccel.launching.api import launch
from nbaccel.launching.gpu_trouble import TorchBuild
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes import shutdown

LINE = (
    "in this process, as in Accelerate: no restart for memory, no watch for hangs, no clean kernel; "
    "launch(train, num_processes=1) has them\n"
)
seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen(launcher: Launcher) -> Iterator[None]:
    seen.clear()
    yield
    with launcher.turn():  # the next run, at which the last reference to a group that was left is dropped
        pass


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def trained(accelerator: Accelerator, model: torch.nn.Module, steps: int, each: Callable[[int], Any] = int) -> None:
    """Train for some steps; `each` is called inside of every one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            each(step)
            optimizer.step()
            optimizer.zero_grad()


# What the function has and gives


def test_arguments_globals_and_the_value_are_the_objects_themselves_in_the_callers_thread() -> None:
    model, lock = torch.nn.Linear(4, 1), threading.Lock()  # no pickle carries that
    before = model.weight.clone()

    def train(model: torch.nn.Module, names: list[str]) -> Any:
        seen.append((os.getpid(), threading.get_ident()))
        names.append("changed")
        trained(Accelerator(), model, 2)
        return lock

    names: list[str] = []
    assert notebook_launcher(train, (model, names), num_processes=1) is lock
    assert seen == [(os.getpid(), threading.get_ident())]
    assert names == ["changed"]
    assert not torch.equal(model.weight, before)
    with pytest.raises(TypeError, match="Nothing was started"):
        notebook_launcher(train, (model,), num_processes=1)


def test_a_call_in_another_thread_runs_there() -> None:
    def call() -> None:
        seen.append(notebook_launcher(threading.get_ident, num_processes=1) == threading.get_ident())

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 3


@pytest.mark.parametrize(
    ("gpus", "asked", "is_here"), [(0, None, True), (1, None, True), (2, None, False), (2, 1, True)]
)
def test_it_is_in_place_where_one_process_was_asked_for_or_there_is_one_device(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: int | None, is_here: bool
) -> None:
    cards = tuple(Gpu(at, f"GPU-{at}", "Tesla T4", 16 * 10**9, number=at) for at in range(gpus))
    monkeypatch.setattr(Survey, "take", classmethod(lambda cls, **asked: Survey(gpus=cards)))
    monkeypatch.setattr(TorchBuild, "loaded", classmethod(lambda cls: None))
    monkeypatch.setattr(ours, "launch", lambda *given, **named: types.SimpleNamespace(value="in ranks"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    value = notebook_launcher(lambda: (os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")), (), asked)
    assert value == ((os.getpid(), hidden) if is_here else "in ranks")


def test_launch_and_a_run_that_shall_start_again_have_a_process_of_their_own() -> None:
    assert launch(os.getpid, num_processes=1).value != os.getpid()
    assert notebook_launcher(os.getpid, num_processes=1, oom="shrink") != os.getpid()


def test_one_line_says_what_only_a_process_of_its_own_has(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        print("mine")

    notebook_launcher(train, num_processes=1)
    assert capfd.readouterr() == (f"{LINE}mine\n", "")
    notebook_launcher(lambda: None, num_processes=1)
    assert "launch(function, num_processes=1)" in capfd.readouterr().out


@pytest.mark.parametrize("uses_cuda", [False, True])
def test_a_gpu_that_this_process_has_filled_is_no_news(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], uses_cuda: bool
) -> None:
    full = Gpu(0, "GPU-a", "Tesla T4", 16 * 10**9, used_bytes=16 * 10**9, number=0)
    monkeypatch.setattr(Survey, "take", classmethod(lambda cls, **asked: Survey(gpus=(full,))))
    monkeypatch.setattr(TorchBuild, "loaded", classmethod(lambda cls: None))
    monkeypatch.setattr(api, "_uses_cuda", lambda: uses_cuda)
    notebook_launcher(int)
    assert ("is full" in capfd.readouterr().err) is not uses_cuda


def test_it_takes_what_accelerates_takes() -> None:
    theirs = inspect.signature(pytest.importorskip("accelerate").notebook_launcher).parameters
    ours = inspect.signature(notebook_launcher).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: ours[name].default for name in theirs} == {name: each.default for name, each in theirs.items()}


def test_random_numbers_go_on_where_they_were() -> None:
    torch.manual_seed(3)
    drawn = torch.rand(1), torch.rand(1)
    torch.manual_seed(3)
    again = notebook_launcher(lambda: torch.rand(1), num_processes=1), torch.rand(1)
    assert again == drawn


# Settings, and what is put back

PRECISION = "ACCELERATE_MIXED_PRECISION"


def test_the_precision_holds_inside_and_the_environment_is_put_back_however_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PRECISION, "no")
    before, handler = dict(os.environ), signal.getsignal(signal.SIGINT)

    def train(end: BaseException | None) -> str:
        seen.append((os.environ[PRECISION], Accelerator().mixed_precision))
        if end is not None:
            raise end
        return "done"

    ends = (None, ValueError("11 classes"), KeyboardInterrupt(), SystemExit(0))
    for end in ends:
        if end is None:
            assert notebook_launcher(train, (end,), 1, "BF16") == "done"
        else:
            with pytest.raises(type(end)) as raised:
                notebook_launcher(train, (end,), 1, "bf16")
            assert raised.value is end
        assert dict(os.environ) == before
        assert signal.getsignal(signal.SIGINT) is handler
    assert seen == [("bf16", "bf16")] * len(ends)
    with pytest.raises(ValueError, match="'fp17'"):
        notebook_launcher(train, (None,), 1, "fp17")


def test_errors_are_the_users_object_and_begin_with_the_users_line() -> None:
    error = KeyError("label")

    def train() -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        notebook_launcher(train, num_processes=1)
    assert raised.value is error
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names == ["test_errors_are_the_users_object_and_begin_with_the_users_line", "train"]


@pytest.mark.parametrize("end", [None, ValueError(), KeyboardInterrupt()], ids=["done", "failed", "interrupted"])
def test_a_second_call_begins_as_in_a_new_process(end: BaseException | None) -> None:
    """A group is formed again, batches are counted from the first, and a model computes as it is told now."""
    dtypes: list[torch.dtype] = []
    steps: list[bool] = []

    class Noting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = self.inner(x)
            dtypes.append(outputs.dtype)
            return outputs

    model = Noting()

    def train() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        accelerator = Accelerator(gradient_accumulation_steps=2)
        trained(accelerator, model, 3, lambda step: steps.append(accelerator.sync_gradients))
        if end is not None:
            raise end

    for precision in ("bf16", "no"):
        with contextlib.nullcontext() if end is None else pytest.raises(type(end)):
            notebook_launcher(train, (), 1, precision)
        assert not dist.is_initialized()
    assert dtypes == [torch.bfloat16] * 3 + [torch.float32] * 3
    assert steps == [False, True, False] * 2


def test_a_group_of_the_notebook_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        notebook_launcher(lambda: Accelerator().wait_for_everyone(), num_processes=1)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_an_accelerator_of_the_notebook_is_not_changed() -> None:
    model = torch.nn.Linear(4, 1)
    own = Accelerator()
    trained(own, model, 3)

    def train() -> Accelerator:
        accelerator = Accelerator()
        trained(accelerator, torch.nn.Linear(4, 1), 2)
        trained(own, model, 1)
        accelerator.end_training()
        return accelerator

    made = notebook_launcher(train, (), 1, "bf16")
    assert (own.mixed_precision, own.state.mixed_precision) == ("no", "no")
    assert (made.mixed_precision, made.state.mixed_precision) == ("bf16", "bf16")  # as it was made
    trained(own, model, 1)
    assert own._context.accumulation.clock.done == 5


# Interrupts


def test_an_interrupt_ends_it_before_the_next_step_with_a_last_checkpoint(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def train() -> None:
        accelerator = Accelerator(checkpoint_every=1000, checkpoint_dir=tmp_path)
        trained(accelerator, torch.nn.Linear(4, 1), 10, lambda step: step == 3 and interrupt())

    model_step: list[int] = []
    with pytest.raises(KeyboardInterrupt, match="interrupted, and stopped before step 4") as raised:
        notebook_launcher(train, num_processes=1)
    assert type(raised.value) is KeyboardInterrupt
    assert "train" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_4"]
    assert signal.getsignal(signal.SIGINT) is handler
    notebook_launcher(lambda: trained(Accelerator(), torch.nn.Linear(4, 1), 2, model_step.append), num_processes=1)
    assert model_step == [0, 1]


def test_the_second_interrupt_acts_at_once() -> None:
    def twice(step: int) -> None:
        interrupt()
        seen.append("first")
        interrupt()
        seen.append("never")

    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(lambda: trained(Accelerator(), torch.nn.Linear(4, 1), 2, twice), num_processes=1)
    assert seen == ["first"]


def wait() -> None:
    """As a program that computes: interrupts that do not raise do not end it."""
    time.sleep(30)


@pytest.mark.full
@pytest.mark.parametrize("begins", [lambda: None, lambda: (emit(StepEntered(0)), emit(StepsEnded()))])
def test_outside_of_steps_an_interrupt_acts_after_a_moment(
    monkeypatch: pytest.MonkeyPatch, begins: Callable[[], Any]
) -> None:
    monkeypatch.setattr(shutdown, "_NO_STEP_S", 0.05)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(lambda: (begins(), interrupt(), wait()), num_processes=1)


@pytest.mark.full
def test_a_step_that_takes_too_long_is_interrupted_and_the_user_hears_that_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutdown, "_FIRST_STEP_S", 0.3)
    monkeypatch.setattr(inline, "NOTICE_AFTER_S", 0.05)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(lambda: (emit(StepEntered(0)), interrupt(), wait()), num_processes=1)
    assert capfd.readouterr().err == f"{shutdown.FINISHING}\n"


def test_a_function_that_catches_the_interrupt_goes_on_and_returns() -> None:
    def train() -> str:
        accelerator = Accelerator()
        try:
            trained(accelerator, torch.nn.Linear(4, 1), 10, lambda step: step == 1 and interrupt())
        except KeyboardInterrupt as error:
            seen.append(str(error))
        trained(accelerator, torch.nn.Linear(4, 1), 3, seen.append)
        return "saved"

    assert notebook_launcher(train, num_processes=1) == "saved"
    assert seen == ["stopped before step 2", 0, 1, 2]


def test_an_interrupt_that_the_function_did_not_meet_is_raised_behind_it() -> None:
    def train() -> None:
        emit(StepEntered(0))
        interrupt()
        seen.append("through")

    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(train, num_processes=1)
    assert seen == ["through"]
    assert PRECISION not in os.environ


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    def mine(number: int, frame: Any) -> None:
        seen.append("mine")

    def train() -> None:
        interrupt()
        emit(StepEntered(0))
        seen.append("goes on")

    before = signal.signal(signal.SIGINT, mine)
    try:
        notebook_launcher(train, num_processes=1)
        assert seen == ["mine", "goes on"]
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, before)
        notebook_launcher(lambda: signal.signal(signal.SIGINT, mine), num_processes=1)
        assert signal.getsignal(signal.SIGINT) is mine  # as the function wanted
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_the_function_has_kept_is_the_notebooks_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    kept = notebook_launcher(lambda: signal.getsignal(signal.SIGINT), num_processes=1)
    signal.signal(signal.SIGINT, kept)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


# Other launches, around it and in it


def test_calls_inside_of_a_call_run_in_it_and_may_start_ranks() -> None:
    def outer() -> Any:
        inner = notebook_launcher(
            lambda: trained(Accelerator(), torch.nn.Linear(4, 1), 2, seen.append), num_processes=1
        )
        return inner, Accelerator().mixed_precision, launch(os.getpid, 1).value, os.environ[PRECISION]

    inner, precision, pid, after = notebook_launcher(outer, (), 1, "bf16")
    assert (inner, precision, after) == (None, "bf16", "bf16")
    assert pid != os.getpid()
    assert seen == [0, 1]


def test_an_interrupt_of_a_call_inside_of_another_ends_both() -> None:
    def inner() -> None:
        trained(Accelerator(), torch.nn.Linear(4, 1), 5, lambda step: step == 1 and interrupt())

    with pytest.raises(KeyboardInterrupt, match="before step 2"):
        notebook_launcher(lambda: (notebook_launcher(inner, num_processes=1), seen.append("never")), num_processes=1)
    assert seen == []


def test_a_rank_calls_no_launcher_for_one_process_either() -> None:
    with pytest.raises(NestedLaunch, match="call the function directly"):
        launch(lambda: notebook_launcher(print, num_processes=1), 1)


def test_it_does_not_wait_for_a_run_in_the_background(launcher: Launcher) -> None:
    is_there, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with launcher.turn("cell [3] has been running in the background"):
            is_there.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_there.wait()
    try:
        with pytest.raises(LaunchRefused, match=r"cell \[3\]"):
            notebook_launcher(seen.append, ("never",), num_processes=1)
    finally:
        is_over.set()
        thread.join()
    assert seen == []


def test_a_run_for_which_no_caller_waits_says_so_until_its_own_end_and_not_until_that_of_one_inside(
    launcher: Launcher,
) -> None:
    answers: list[str] = []

    def ask() -> None:
        try:
            with launcher.turn():
                answers.append("has its turn")
        except LaunchRefused as error:
            answers.append(str(error))

    def answer_in_another_thread() -> str:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return answers[-1]

    with launcher.turn("cell [3] has been running"):
        with launcher.turn():  # of a run inside
            assert answer_in_another_thread() == "cell [3] has been running"
        assert answer_in_another_thread() == "cell [3] has been running"
    assert answer_in_another_thread() == "has its turn"


# Memory


def test_memory_that_runs_out_is_met_inside_by_smaller_batches_and_by_smaller_parts() -> None:
    def train() -> tuple[int, float]:
        @find_executable_batch_size(starting_batch_size=8)
        def fit(batch_size: int) -> int:
            trained(Accelerator(), torch.nn.Linear(4, 1), 1)
            if batch_size > 2:
                raise torch.OutOfMemoryError("CPU out of memory")
            return batch_size

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(4, 1))

        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            if len(batch) > 2:
                raise torch.OutOfMemoryError("CPU out of memory")
            return model(batch).mean()

        return fit(), float(accelerator.forward_backward(loss_of, torch.ones(8, 4)))

    size, loss = notebook_launcher(train, num_processes=1)
    assert size == 2
    assert loss == loss  # a number


def test_a_time_limit_of_the_program_ends_it_well(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        trained(Accelerator(time_limit=0.001), torch.nn.Linear(4, 1), 10_000, lambda step: time.sleep(0.001))

    assert notebook_launcher(train, num_processes=1) is None
    assert "the time limit of" in capfd.readouterr().out


# Trainers of other libraries


@contextlib.contextmanager
def a_trainers_module() -> Iterator[type]:
    """What there is of transformers' `Trainer` for a callback, where its module is not loaded."""
    name = "transformers.trainer"
    module = types.ModuleType(name)

    class TrainerCallback:
        pass

    class Trainer:
        def __init__(self) -> None:
            self.callback_handler = types.SimpleNamespace(callbacks=[TrainerCallback()])
            self.add_callback = self.callback_handler.callbacks.append
            self.state = types.SimpleNamespace(global_step=0, num_train_epochs=1, max_steps=5)
            self.control = types.SimpleNamespace(should_training_stop=False)

        def train(self, each: Callable[[int], Any]) -> str:
            args = types.SimpleNamespace(
                num_train_epochs=1, max_steps=5, train_batch_size=2, gradient_accumulation_steps=1
            )
            reports = self.callback_handler.callbacks[-1]
            reports.on_train_begin(args, self.state, self.control)
            for step in range(5):
                each(step)
                self.state.global_step = step + 1
                reports.on_log(args, self.state, self.control, {"loss": 1.0})
                reports.on_step_end(args, self.state, self.control)
                if self.control.should_training_stop:
                    break
            reports.on_train_end(args, self.state, self.control)
            return "trained"

    module.Trainer = Trainer  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for each in (sys.modules.get("transformers", types.ModuleType("transformers")), module):
            patch.setitem(sys.modules, each.__name__, each)
        yield Trainer


def test_a_foreign_trainer_reports_for_the_time_of_the_call_and_is_as_before_afterwards() -> None:
    with a_trainers_module() as kind:
        trainer, train, finders = kind(), vars(kind)["train"], list(sys.meta_path)
        run = launch(lambda: trainer.train(int), 1, start_method="inline")
        assert (run.value, len(run.history.rows)) == ("trained", 5)
        assert vars(kind)["train"] is train
        left = trainer.callback_handler.callbacks
        assert not any(isinstance(each, transformers.TransformersCallback) for each in left)
        assert sys.meta_path == finders


def test_a_foreign_trainer_that_an_interrupt_has_ended_does_not_return_to_its_program() -> None:
    with a_trainers_module() as kind:
        trainer = kind()

        def train() -> None:
            trainer.train(lambda step: step == 1 and interrupt())
            seen.append("never")

        with pytest.raises(KeyboardInterrupt):
            notebook_launcher(train, num_processes=1)
        assert trainer.state.global_step == 2
        assert seen == []


# Beside Accelerate's own


@pytest.mark.parametrize("library", ["nbaccel", "accelerate"])
def test_what_a_program_can_see_of_it_is_the_same_with_both_libraries(
    library: str, capfd: pytest.CaptureFixture[str]
) -> None:
    call = pytest.importorskip(library).notebook_launcher
    error, numbers, environ = LookupError("label"), [], dict(os.environ)

    def fail() -> None:
        raise error

    def train(given: list[int]) -> None:
        given.append(threading.get_ident())
        call(given.append, (len(given),), num_processes=1)  # a call inside of a call

    call(train, (numbers,), num_processes=1)
    assert numbers == [threading.get_ident(), 1]
    with pytest.raises(LookupError) as raised:
        call(fail, (), 1)
    assert raised.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    with pytest.raises(SystemExit, match="3"):
        call(sys.exit, (3,), 1)
    assert dict(os.environ) == environ
    said = capfd.readouterr()
    assert said.err == ""
    assert len(said.out.splitlines()) == 4  # a line for each call


@pytest.mark.slow
def test_a_script_has_the_line_and_the_users_own_traceback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from nbaccel import Accelerator, notebook_launcher\n"
        "def train(): return lambda: Accelerator().mixed_precision\n"
        "print(notebook_launcher(train, num_processes=1)())\n"
        "notebook_launcher(lambda: 1 / 0, num_processes=1)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[:2]) == (1, [LINE.strip(), "no"])
    assert "/nbaccel/" not in done.stderr
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
