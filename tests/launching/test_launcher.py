"""`launch` and its relatives, in scripts: values, errors, deaths, stops; under fork and zygote."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nbaccel.base.hardware import Driver, Gpu, Survey
from nbaccel.errors import LaunchRefused, NestedLaunch, NoInput, RankDied, RanksFailed, ResultsMissing
from nbaccel.launchers import debug_launcher, notebook_launcher
from nbaccel.launching import api
from nbaccel.launching.api import launch
from nbaccel.launching.gpu_trouble import TorchBuild
from nbaccel.launching.ipc import channel
from nbaccel.launching.ipc.reaper import session_members
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes import shutdown
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.router import OutputRouter
from nbaccel.output.screens import ConsoleScreen


def rank() -> int:
    return int(os.environ["RANK"])


def test_values_come_back_by_rank(start_method: str) -> None:
    run = launch(lambda x: (rank(), x), 2, args=("x",), start_method=start_method)
    assert run.values == [(0, "x"), (1, "x")]
    assert run.start_method == start_method


def test_a_large_value_comes_back_whole(start_method: str) -> None:
    import torch

    run = launch(lambda: torch.arange(3_000_000), 2, start_method=start_method)
    assert torch.equal(run.value, torch.arange(3_000_000))


def test_a_prepared_model_comes_back_as_it_was_written(start_method: str) -> None:
    def train() -> Any:
        import torch

        from nbaccel import Accelerator

        return {"model": Accelerator(mixed_precision="fp16").prepare(torch.nn.Linear(2, 1)), "loss": 0.5}

    value = launch(train, 2, start_method=start_method).value
    assert type(value["model"]).__name__ == "Linear"
    assert "forward" not in vars(value["model"])


def test_a_closure_over_a_lock_works_in_a_fork_and_is_refused_by_the_zygote() -> None:
    lock = threading.Lock()

    def locked() -> int:
        with lock:
            return rank()

    assert launch(locked, 2, start_method="fork").values == [0, 1]
    with pytest.raises(LaunchRefused, match="function"):
        launch(locked, 2, start_method="zygote")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_failing_rank_is_named_and_its_error_raised(failing: int, start_method: str) -> None:
    def train() -> None:
        if rank() == failing:
            raise ValueError("expected 10 classes, got 11")
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(ValueError, match="expected 10 classes, got 11") as caught:
        launch(train, 3, start_method=start_method)
    assert time.monotonic() - began < 15
    assert f"rank {failing} of 3" in caught.value.__notes__[0]
    assert "expected 10 classes" in str(caught.value.__cause__)
    assert "train" in str(caught.value.__cause__)
    assert "worker.py" not in str(caught.value.__cause__)


def test_the_cause_is_named_and_not_the_peer_that_lost_its_connection(start_method: str) -> None:
    def train() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDied, match="rank 1 of 2 was killed by SIGKILL") as caught:
        launch(train, 2, start_method=start_method)
    assert caught.value.rank == 1
    assert caught.value.exit_code == -signal.SIGKILL


def test_an_error_that_cannot_be_pickled_keeps_its_name_and_text(start_method: str) -> None:
    def train() -> None:
        class Odd(Exception):
            def __init__(self) -> None:
                super().__init__("odd")
                self.lock = threading.Lock()

        raise Odd

    with pytest.raises(RanksFailed, match="odd") as caught:
        launch(train, 1, start_method=start_method)
    assert type(caught.value).__name__ == "Odd"


def test_the_traceback_of_an_endless_recursion_is_cut_in_the_middle() -> None:
    def again(depth: int) -> None:
        again(depth + 1)

    error = launch(again, 1, args=(0,), check=False).error
    assert isinstance(error, RecursionError)
    lines = str(error.__cause__).splitlines()
    assert len(lines) < 100
    assert any(line.startswith("... ") and line.endswith(" more calls ...") for line in lines)


def test_an_exit_code_is_named() -> None:
    with pytest.raises(RankDied, match="ended with exit code 3 before its work was done"):
        launch(lambda: os._exit(3), 2)


def test_sys_exit_ends_the_ranks_and_says_so(start_method: str) -> None:
    with pytest.raises(RanksFailed, match=r"called sys\.exit\(1\)"):
        launch(lambda: sys.exit(1), 2, start_method=start_method)


def test_a_value_that_cannot_travel_is_named_with_the_reason() -> None:
    with pytest.raises(ResultsMissing, match="rank 0 could not send its value back"):
        launch(lambda: threading.Lock(), 2)


def test_check_false_returns_the_failed_run() -> None:
    def train() -> int:
        if rank() == 1:
            raise KeyError("missing")
        return 7

    run = launch(train, 2, check=False)
    assert isinstance(run.error, KeyError)
    assert run.values[1] is None


def test_input_raises_a_sentence_at_once(start_method: str) -> None:
    with pytest.raises(NoInput, match="nobody can type into a rank"):
        launch(lambda: input("name? "), 2, start_method=start_method)


def test_a_rank_cannot_launch_ranks(start_method: str) -> None:
    def nested() -> None:
        from nbaccel.launching.api import launch

        launch(print, 2)

    with pytest.raises(NestedLaunch, match="ranks do not launch ranks"):
        launch(nested, 2, start_method=start_method)


def test_a_function_that_takes_other_arguments_is_refused_before_the_start() -> None:
    def train(a: int, b: int) -> None: ...

    with pytest.raises(TypeError, match=r"train\(a: .int., b: .int.\).*missing.*Nothing was started"):
        notebook_launcher(train, args=(1,), num_processes=2)
    with pytest.raises(TypeError, match=r"write args=\(5,\)"):
        notebook_launcher(train, args=5, num_processes=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be the function"):
        notebook_launcher(train(1, 2), num_processes=2)  # type: ignore[arg-type, func-returns-value]


def test_zero_processes_are_refused() -> None:
    with pytest.raises(LaunchRefused, match="1 or more"):
        launch(print, 0)


def test_the_number_of_processes_is_a_whole_number_of_any_type() -> None:
    class Two:
        def __index__(self) -> int:
            return 2

    assert launch(rank, Two()).values == [0, 1]  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integer"):
        launch(rank, 2.0)  # type: ignore[arg-type]


def test_the_precision_asked_for_reaches_the_ranks() -> None:
    value = notebook_launcher(lambda: os.environ["ACCELERATE_MIXED_PRECISION"], num_processes=2, mixed_precision="bf16")
    assert value == "bf16"
    with pytest.raises(ValueError, match="'fp17'"):
        notebook_launcher(print, num_processes=2, mixed_precision="fp17")
    with pytest.raises(ValueError, match="'auto'"):  # which is for cells
        launch(print, 2, mixed_precision="auto")


def test_the_strategy_asked_for_reaches_the_ranks_and_one_process_of_the_notebook() -> None:
    def chosen() -> str:
        return os.environ["NBACCEL_STRATEGY"]

    assert launch(chosen, 2, strategy="fsdp").values == ["fsdp", "fsdp"]
    assert notebook_launcher(chosen, num_processes=2, strategy="ddp") == "ddp"
    assert notebook_launcher(chosen, num_processes=1, strategy="fsdp") == "fsdp"
    assert "NBACCEL_STRATEGY" not in os.environ
    with pytest.raises(ValueError, match="strategy must be one of"):
        launch(chosen, 2, strategy="")


def test_arguments_that_mean_nothing_here_are_accepted_and_explained() -> None:
    with pytest.warns(UserWarning, match="use_port: accepted and not used"):
        notebook_launcher(rank, num_processes=2, use_port="29501")
    with pytest.raises(ValueError, match=r"num_nodes=2, .*: one notebook .*\.launch\(function, nodes='host1,host2'\)"):
        notebook_launcher(rank, num_processes=2, num_nodes=2)


def test_ranks_that_fail_are_started_again_as_often_as_max_restarts_says(tmp_path: Path) -> None:
    tries = tmp_path / "tries"

    def fails(times: int) -> int:
        if rank() == 0:
            tries.touch()
            tries.write_text(tries.read_text() + "x")
            if len(tries.read_text()) <= times:
                raise OSError("the disk\nis full")
        return 7

    with pytest.warns(UserWarning, match="started again") as told:
        assert notebook_launcher(fails, (2,), num_processes=2, max_restarts=2) == 7
    assert [str(each.message) for each in told] == [
        f"the ranks failed with OSError: the disk, and are started again: restart {restart} of max_restarts=2. The "
        "function begins anew."
        for restart in (1, 2)
    ]
    assert {each.filename for each in told} == {__file__}
    tries.unlink()
    with pytest.raises(OSError, match="the disk"), pytest.warns(UserWarning, match="restart 1 of max_restarts=1"):
        notebook_launcher(fails, (2,), num_processes=2, max_restarts=1)


def test_what_a_rank_wrote_before_it_was_killed_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    """Its pipe still holds most of 800 kB when its end is seen."""

    def dies() -> None:
        text = "".join(f"{'word ' * 20}{number}\n" for number in range(8000))
        os.write(1, text.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied):
        launch(dies, 1, cpu=True)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("word ")]
    assert len(lines) == 8000
    assert lines[-1].endswith(" 7999")


def test_it_arrives_also_where_the_notebook_takes_long_to_read_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def dies() -> None:
        os.write(1, b"".join(b"%s %d\n" % (b"word " * 20, number) for number in range(8000)))
        os.kill(os.getpid(), signal.SIGKILL)

    def feed(router: OutputRouter, rank: int, stream: str, data: bytes) -> None:
        time.sleep(0.3)
        as_before(router, rank, stream, data)

    as_before = OutputRouter.feed
    monkeypatch.setattr(OutputRouter, "feed", feed)
    with pytest.raises(RankDied):
        launch(dies, 1, cpu=True)
    assert sum(line.startswith("word ") for line in capfd.readouterr().out.splitlines()) == 8000


@pytest.mark.filterwarnings("always::ResourceWarning")
def test_a_rank_does_not_complain_of_our_own_sockets(start_method: str, capfd: pytest.CaptureFixture[str]) -> None:
    launch(rank, 2, start_method=start_method)
    assert "ResourceWarning" not in capfd.readouterr().err


def test_debug_launcher_runs_on_the_cpu() -> None:
    assert debug_launcher(lambda: os.environ["ACCELERATE_USE_CPU"]) == "true"


@pytest.mark.parametrize("fails", [False, True])
def test_the_folder_in_which_ranks_meet_goes_with_them(fails: bool, launcher: Launcher) -> None:
    met = launch(lambda: 1 / 0 if fails else os.environ.get("MASTER_PORT"), 2, start_method="fork", check=False)
    assert (met.error is not None) == fails
    assert not list(Path(launcher.resources.new_log()).parent.glob("ranks-*"))


class BusyUntil(ConsoleScreen):
    """A screen whose first text takes as long as another process has `written` open."""

    def __init__(self, read: int, written: int) -> None:
        super().__init__()
        self._ends: tuple[int, ...] = (written, read)

    def write(self, stream: str, text: str) -> None:
        super().write(stream, text)
        if self._ends:
            os.close(self._ends[0])
            os.read(self._ends[1], 1)
            os.close(self._ends[1])
            self._ends = ()


def test_what_a_rank_has_written_last_is_shown_when_it_is_gone(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """More lies in its pipe than is read at once when the kernel, busy until then, hears of its end."""
    monkeypatch.setattr(channel, "_READ_AT_ONCE", 1000)

    def dies() -> None:
        os.write(1, b"begins\n" + b"x" * 20_000 + b"\nlast words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    spec = LaunchSpec(FunctionTask(dies), Devices(1), Start("fork", "a test"))
    launcher.run(spec, RunObservers(BusyUntil(*os.pipe())))[1].close()
    shown = capfd.readouterr().out.splitlines()
    assert [shown[0], shown[-1]] == ["begins", "last words"]


def test_a_launch_on_the_cpu_does_not_ask_the_gpu_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        "nbaccel.base.hardware._look_for_gpus", lambda *question: (tuple(asked.append(question) or ()), Driver())
    )
    assert launch(rank, 1, cpu=True).values == [0]
    assert not asked
    assert launch(rank, 1).values == [0]
    assert asked


def test_a_time_limit_ends_the_run_with_timeout_error(start_method: str) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="time limit"):
        launch(time.sleep, 2, args=(60,), timeout_s=0.3, start_method=start_method)
    assert time.monotonic() - began < 15


def test_an_interrupt_raises_keyboard_interrupt_and_leaves_nothing(start_method: str) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        launch(time.sleep, 2, args=(60,), start_method=start_method)
    timer.join()


def test_an_interrupt_while_the_ranks_are_set_up_ends_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_method: str
) -> None:
    (tmp_path / "slow_setup.py").write_text("import time\ndef set_up(namespace):\n    time.sleep(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(shutdown, "_NO_STEP_S", 0.1)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    run = launch((tmp_path / "began").touch, 2, setup="slow_setup:set_up", start_method=start_method, check=False)
    timer.join()
    assert isinstance(run.error, KeyboardInterrupt)
    assert not (tmp_path / "began").exists()


def test_a_second_interrupt_ends_ranks_that_do_not_listen() -> None:
    def deaf() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        time.sleep(60)

    timers = [threading.Timer(at, os.kill, (os.getpid(), signal.SIGINT)) for at in (0.3, 0.6)]
    for timer in timers:
        timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(deaf, 2)
    assert time.monotonic() - began < 15
    for timer in timers:
        timer.join()


class SlowToSend:
    """Takes 1.5 s on its way out of a rank, as some GB of tensors do."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(1.5)
        return int, (7,)


class InterruptsOnItsWay(SlowToSend):
    """Interrupts the kernel once it is on its way out of both ranks."""

    def __init__(self, kernel: int, folder: Path) -> None:
        self._kernel = kernel
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        (self._folder / str(os.getpid())).touch()
        with contextlib.suppress(FileExistsError):
            if len(list(self._folder.iterdir())) == 2:
                (self._folder / "interrupted").touch(exist_ok=False)
                os.kill(self._kernel, signal.SIGINT)
        return super().__reduce__()


def test_an_interrupt_does_not_cut_off_results_that_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutdown, "_NO_STEP_S", 0.1)
    monkeypatch.setattr(shutdown, "_PATIENCE_S", 0.2)
    run = launch(InterruptsOnItsWay, 2, args=(os.getpid(), tmp_path), check=False)
    assert isinstance(run.error, KeyboardInterrupt)
    assert run.values == [7, 7]


def test_a_rank_that_fails_does_not_cut_off_results_of_rank_0() -> None:
    def train() -> Any:
        if rank() == 1:
            time.sleep(0.3)
            raise ValueError("late")
        return SlowToSend()

    run = launch(train, 2, check=False)
    assert isinstance(run.error, ValueError)
    assert run.value == 7


def test_the_ranks_own_atexit_handlers_and_threads_finish_and_the_kernels_do_not_run(tmp_path: Path) -> None:
    import atexit

    def kernels() -> None:
        (tmp_path / "kernel").touch()

    atexit.register(kernels)

    def train() -> None:
        atexit.register((tmp_path / f"atexit-{rank()}").touch)
        threading.Thread(target=lambda: (time.sleep(0.3), (tmp_path / f"thread-{rank()}").touch())).start()

    launch(train, 2)
    atexit.unregister(kernels)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atexit-0", "atexit-1", "thread-0", "thread-1"]


def test_what_the_kernel_keeps_by_thread_is_not_destroyed_in_forked_ranks(tmp_path: Path) -> None:
    class Connection:
        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()  # as one that tells its server would

    own = threading.local()
    own.connection = Connection()
    assert launch(rank, 2, start_method="fork").values == [0, 1]
    assert not list(tmp_path.iterdir())
    del own.connection
    assert (tmp_path / str(os.getpid())).exists()


def test_presses_without_pause_do_not_put_off_the_end() -> None:
    def deaf() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    timers = [threading.Timer(0.5 + 0.2 * interrupt, os.kill, (os.getpid(), signal.SIGINT)) for interrupt in range(25)]
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)  # what comes when the run is over
    for timer in timers:
        timer.start()
    began = time.monotonic()
    try:
        run = launch(deaf, 2, check=False)
        assert isinstance(run.error, KeyboardInterrupt)
        assert time.monotonic() - began < 15
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        signal.signal(signal.SIGINT, previous)


def test_processes_that_a_rank_left_running_are_ended() -> None:
    def train() -> list[int]:
        import subprocess

        return [subprocess.Popen(["sleep", "60"]).pid]

    pids = [pid for value in launch(train, 2).values for pid in value]
    assert not session_members(pids)


_INTERRUPTED_IMPORT = """
import os, signal, sys, threading, time
from nbaccel import launch
def press():
    while "torch._torch_docs" not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
try:
    launch(abs, 1, args=(-1,))
except KeyboardInterrupt:
    print("interrupted")
print(launch(abs, 1, args=(-2,)).value)
"""


@pytest.mark.full
def test_an_interrupt_while_torch_is_imported_leaves_torch_whole() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["interrupted", "2"], done.stderr


_COLLECTORS = """
import gc
from nbaccel import launch
if {is_off}:
    gc.disable()
print(*launch(gc.isenabled, 1, start_method="fork").values, gc.isenabled(), end=" ")
print(*launch(gc.isenabled, 1, start_method="zygote").values, gc.isenabled())
"""


@pytest.mark.parametrize(("is_off", "found"), [(False, "True True True True"), (True, "False False True False")])
def test_the_collector_is_as_before_a_launch_that_loads_torch(is_off: bool, found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COLLECTORS.format(is_off=is_off)], capture_output=True, text=True, timeout=50
    )
    assert done.stdout.strip() == found, done.stderr


def test_a_launch_that_finds_torch_loaded_starts_no_thread_to_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(rank, 1).values == [0]  # everything is loaded now
    monkeypatch.setattr("nbaccel.launching.launcher.ThreadPoolExecutor", None)
    assert launch(rank, 1).values == [0]


def _files() -> set[str]:
    """What this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_a_forked_rank_holds_no_socket_that_listens_and_keeps_the_users_others() -> None:
    mine, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, mine, theirs:
        listening, own = (os.readlink(f"/proc/self/fd/{each.fileno()}") for each in (server, mine))
        held = launch(_files, 1, start_method="fork").value
    assert own in held
    assert listening not in held


def test_a_group_can_be_made_destroyed_and_made_again(start_method: str) -> None:
    def train() -> list[float]:
        import torch
        import torch.distributed as dist

        sums = []
        for _ in range(2):
            dist.init_process_group("gloo")
            total = torch.ones(1)
            dist.all_reduce(total)
            sums.append(total.item())
            dist.destroy_process_group()
        return sums

    assert launch(train, 2, start_method=start_method).values == [[2.0, 2.0], [2.0, 2.0]]


def test_ranks_that_return_at_once_do_not_break_their_peers() -> None:
    def train() -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return rank()

    for _ in range(5):
        assert launch(train, 2).values == [0, 1]


def test_ranks_compute_after_the_kernel_computed_with_many_threads() -> None:
    import torch

    image = torch.randn(4, 3, 64, 64, requires_grad=True)
    torch.nn.Conv2d(3, 8, 3)(image).sum().backward()
    (torch.randn(800, 800) @ torch.randn(800, 800)).sum().item()

    def train() -> float:
        matrix = torch.randn(600, 600)
        torch.nn.Conv2d(3, 8, 3)(torch.randn(4, 3, 64, 64)).sum().backward()
        return float((matrix @ matrix).sum())

    for _ in range(5):
        assert len(launch(train, 2).values) == 2


def test_a_fork_that_cuda_would_break_goes_on_by_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    monkeypatch.setattr("nbaccel.launching.rank.process_setup.has_gpu_driver", lambda: True)
    run = launch(rank, 2)
    assert run.values == [0, 1]
    assert run.start_method == "zygote"
    assert "CUDA was already used" in run.start_reason
    with pytest.raises(LaunchRefused, match="leave it out"):
        launch(rank, 2, start_method="fork")


def test_a_kernel_that_used_cuda_since_the_start_was_chosen_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are loaded for the ranks may have used it, or a cell while a run in the background starts again."""
    monkeypatch.setattr(
        "nbaccel.launching.launcher.why_forks_fail", lambda: "the CUDA driver is in use in the notebook"
    )
    run = launch(rank, 2)
    assert run.values == [0, 1]
    assert (run.start_method, run.start_reason) == ("zygote", "the CUDA driver is in use in the notebook")
    with pytest.raises(LaunchRefused, match=r"^The CUDA driver is in use in the notebook, so forked .* leave it out"):
        launch(rank, 2, start_method="fork")


def test_a_build_for_cuda_forks_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `torch.cuda.is_available()` marks forks as broken too, which no device can suffer from."""
    import torch

    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    monkeypatch.setattr("nbaccel.launching.rank.process_setup.has_gpu_driver", lambda: False)
    assert launch(rank, 2).start_method == "fork"


def test_an_initialised_cuda_starts_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert launch(rank, 2).start_method == "zygote"


def test_what_a_killed_rank_has_of_nccls_memory_goes_with_it() -> None:
    path = f"/dev/shm/nccl-t{os.getpid() % 100000:05}"

    def hold_and_fail() -> None:
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            held = open(path, "wb")  # noqa: SIM115  # for as long as the rank lives
            while True:
                try:
                    time.sleep(60)
                except KeyboardInterrupt:
                    held.flush()
        while not os.path.exists(path):
            time.sleep(0.01)
        raise ValueError("the other one cannot go on")

    try:
        with pytest.raises(ValueError, match="the other one"):
            launch(hold_and_fail, 2)
        assert not os.path.exists(path)
    finally:
        Path(path).unlink(missing_ok=True)


def test_a_launch_that_has_to_take_the_cpu_says_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    survey = Survey(driver=Driver(silence="Driver/library version mismatch"))
    monkeypatch.setattr(Survey, "take", classmethod(lambda cls, **asked: survey))
    launch(os.getpid, 1, start_method="inline")
    assert (
        "1 rank on the CPU, NOT on a GPU: the driver does not answer (NVML: Driver/library version mismatch)\n"
        in capfd.readouterr().err
    )
    launch(os.getpid, 1, cpu=True, start_method="inline")
    assert "GPU" not in capfd.readouterr().err


def test_a_launch_says_what_will_keep_a_gpu_from_computing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = Gpu(0, "GPU-a", "Tesla T4", 16 * 10**9, used_bytes=16 * 10**9, number=0)
    monkeypatch.setattr(Survey, "take", classmethod(lambda cls, **asked: Survey(gpus=(full,))))
    monkeypatch.setattr(TorchBuild, "loaded", classmethod(lambda cls: TorchBuild("2.13.0+cpu", ())))
    launch(os.getpid, 1, start_method="inline")
    said = capfd.readouterr().err
    assert "torch 2.13.0+cpu is built without CUDA, so no rank can use the GPU" in said
    assert "GPU 0 Tesla T4 is full: 0.0 GB of 16.0 GB are free" in said


@pytest.mark.parametrize(("chosen", "found"), [(None, "0"), ("1", "1")])
def test_torch_s_watchdog_leaves_errors_of_the_device_to_programs_that_form_their_groups_themselves(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, found: str
) -> None:
    name = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
    monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(name, chosen)
    assert launch(lambda: os.environ[name], 1, cpu=True, start_method="fork").values == [found]


def test_inline_runs_in_this_process_and_puts_the_environment_back() -> None:
    before = dict(os.environ)
    run = launch(os.getpid, 1, start_method="inline", mixed_precision="bf16")
    assert run.value == os.getpid()
    assert dict(os.environ) == before


def test_inline_runs_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher()
    monkeypatch.setattr(api, "default_launcher", lambda: launcher)
    monkeypatch.delattr(os, "pidfd_open")  # macOS has none
    assert launch(pow, args=(2, 5)).value == 32
    launcher.close()


def test_an_inline_run_that_fails_has_its_error_and_the_history_until_then() -> None:
    def train() -> None:
        from nbaccel.base.events import Metric, emit

        emit(Metric({"loss": 0.5}, 0))
        raise ValueError("11 classes")

    run = launch(train, 1, start_method="inline", check=False)
    assert isinstance(run.error, ValueError)
    assert run.history.rows == [{"step": 0, "loss": 0.5}]


def test_metrics_of_rank_0_are_the_history() -> None:
    def train() -> None:
        from nbaccel.base.events import Metric, emit

        for step in range(3):
            emit(Metric({"loss": 1.0 / (step + 1)}, step))

    history = launch(train, 2).history
    assert history.rows == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 1 / 3}]


def test_a_child_that_the_function_forked_does_not_speak_for_its_rank(start_method: str) -> None:
    def train() -> int:
        me = os.getpid()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return int(os.getpid() == me)

    assert launch(train, 2, start_method=start_method).values == [1, 1]


def test_a_child_that_the_function_forked_ends_with_its_own_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> list[int]:
        codes = []
        for error in (ValueError("of the child"), SystemExit(3), SystemExit()):
            child = os.fork()
            if not child:
                print("unfinished", end="")
                raise error
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return codes

    assert launch(train, 1).value == [1, 3, 0]
    printed = capfd.readouterr()
    assert printed.out.count("unfinished") == 3
    assert "ValueError: of the child" in printed.err


def test_a_process_that_ignores_the_ends_of_its_children_can_launch() -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert launch(rank, 2).values == [0, 1]
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_a_slower_rank_may_fail_alike_before_it_is_interrupted(
    start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "_ALIKE_S", 20.0)  # on a busy machine ranks start far apart
    monkeypatch.setattr(shutdown, "_PEERS_S", 80.0)

    def train() -> None:
        if rank() == 0:
            time.sleep(0.03)
        raise ValueError("the same everywhere")

    with pytest.raises(ValueError, match="the same everywhere") as caught:
        launch(train, 2, start_method=start_method)
    assert caught.value.__notes__ == ["raised on all 2 ranks"]


def test_a_rank_that_came_to_its_end_is_not_said_to_have_died_too(start_method: str) -> None:
    with pytest.raises(RankDied) as caught:
        launch(lambda: os._exit(3) if rank() else None, 2, start_method=start_method)
    assert "rank 1 of 2 ended with exit code 3 before its work was done" in str(caught.value)
    assert "the same on" not in str(caught.value)


def test_what_ranks_printed_is_for_the_user_alone(start_method: str) -> None:
    log = launch(print, 1, args=("secret",), start_method=start_method).log_path
    assert stat.S_IMODE(os.stat(log).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(log)).st_mode) == 0o700
