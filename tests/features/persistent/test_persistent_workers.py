"""Ranks that stay: what they keep from task to task, when they are in step, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.settings import RunSettings
from nbaccel.errors import CannotSend, RankDied
from nbaccel.features.persistent.namespace_tasks import InitTask, Pull, Push
from nbaccel.features.persistent.persistent_start import start_persistent
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.reaper import session_members
from nbaccel.launching.ipc.shared_namespace import SharedNamespace
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, RunEnd, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes import shutdown
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.output.screens import ConsoleScreen

WORLD_SIZE = 2
SETUP = "nbaccel.train.setup:setup_rank"

Make = Callable[..., "Ranks"]


class Ranks:
    """Two ranks that stay, and the notebook they belong to."""

    def __init__(self, launcher: Launcher, method: str, setup: str | None, names: dict[str, Any]) -> None:
        self.notebook: dict[str, Any] = {"__name__": "__main__", **names}
        self.home = SharedNamespace(self.notebook)
        spec = LaunchSpec(
            InitTask(self.home),
            Devices(WORLD_SIZE),
            Start(method, "a test"),
            RunSettings(cpu=True),
            setup=setup,
            end=RunEnd(stays=True),
        )
        self.persistent = start_persistent(launcher, spec, ConsoleScreen())
        self.error: BaseException | None = None
        self.ended: RankResults | None = None

    def cell(
        self,
        code: str,
        out: tuple[str, ...] = (),
        without: Sequence[int] = (),
        beside: Sequence[Pollable] = (),
        **limits: float,
    ) -> dict[str, Any]:
        """What a cell sends back; its error is kept."""
        result_rank = min({*range(WORLD_SIZE)} - {*without})
        source = CellSource(code, "Cell In[1]")
        task = CellTask(source, self.notebook, out, home=self.home, result_rank=result_rank)
        return self._run(task, RunObservers(ConsoleScreen(), beside=beside), without, **limits)

    def push(self, *names: str) -> None:
        push = Push(self.home, names)
        self._run(push, RunObservers(ConsoleScreen()))
        push.has_arrived()

    def pull(self, *names: str, rank: int = 0) -> dict[str, Any]:
        without = [other for other in range(WORLD_SIZE) if other != rank]
        return self._run(Pull(self.home, names, rank), RunObservers(ConsoleScreen()), without)

    def _run(self, task: Any, watching: RunObservers, without: Sequence[int] = (), **limits: float) -> dict[str, Any]:
        run, ended = self.persistent.run(task, watching, title="Cell In[1]", excluded_ranks=without, **limits)
        try:
            self.ended, self.error = ended, run.error
            return ended.values()
        finally:
            ended.close()


@pytest.fixture
def ranks(launcher: Launcher, start_method: str) -> Iterator[Make]:
    """Makes ranks that stay, without a process group unless `setup` makes one; none is left behind."""
    made: list[Ranks] = []

    def make(setup: str | None = None, **names: Any) -> Ranks:
        made.append(Ranks(launcher, start_method, setup, names))
        return made[-1]

    yield make
    for each in made:
        pids = list(each.persistent.pids.values())
        each.persistent.close(RunObservers(ConsoleScreen()))
        assert session_members(pids) == set()


def test_names_stay_in_the_ranks_from_cell_to_cell(ranks: Make) -> None:
    us = ranks(x=5)
    us.cell("import os; y = x + int(os.environ['RANK'])")
    us.cell("y += 1")
    assert us.cell("y", out=("y",))["y"] == 6
    assert us.pull("y", rank=1) == {"y": 7}
    assert "y" not in us.notebook


def test_a_later_name_of_the_notebook_comes_with_the_first_cell_that_reads_it_and_then_drifts(
    ranks: Make,
) -> None:
    us = ranks()
    us.notebook["x"] = 1
    us.cell("x += 10")
    us.notebook["x"] = 2
    assert us.cell("x += 0", out=("x",)) == {"x": 11}
    us.push("x")
    assert us.cell("x += 0", out=("x",)) == {"x": 2}


def test_a_name_that_cannot_travel_is_refused_by_push_and_no_trouble_to_a_cell_that_makes_it_anew(ranks: Make) -> None:
    us = ranks()
    us.notebook["lock"] = threading.Lock()
    with pytest.raises(CannotSend, match="lock"):
        us.push("lock")
    assert us.cell("lock = 3; y = lock", out=("y",)) == {"y": 3}


def test_objects_come_back_as_the_notebooks_own_classes(ranks: Make) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("class Net:\n    pass\nmade = Net()", scope)
    us = ranks(Net=scope["Net"], made=scope["made"])
    us.notebook["later"] = type("Later", (), {"__module__": "__main__"})
    values = us.cell("made.x = 1; other = Net(); third = later()", out=("made", "other", "third"))
    assert type(values["made"]) is type(values["other"]) is us.notebook["Net"]
    assert type(values["third"]) is us.notebook["later"]


def test_a_class_that_was_defined_anew_is_noticed(ranks: Make) -> None:
    us = ranks(f=lambda: 1)
    us.notebook["f"].__module__ = "__main__"
    us.push("f")
    assert us.home.outdated(["f"]) == []
    us.notebook["f"] = lambda: 2
    assert us.home.outdated(["f"]) == ["f"]


def test_an_error_leaves_names_and_ranks_and_the_next_cell_works(ranks: Make) -> None:
    us = ranks(SETUP, y=3)
    us.cell("y += 1; 1 / 0")
    assert isinstance(us.error, ZeroDivisionError)
    assert us.persistent.trouble == ""
    assert us.cell("accelerator.wait_for_everyone(); y += 1", out=("y",)) == {"y": 5}


def test_the_frames_of_an_error_do_not_hold_the_users_objects(ranks: Make) -> None:
    us = ranks()
    us.cell(
        """
        import weakref
        class Large: pass
        def fail():
            global seen
            large = Large()
            seen = weakref.ref(large)
            raise ValueError("no")
        fail()
        """.replace("\n        ", "\n")
    )
    assert isinstance(us.error, ValueError)
    assert us.cell("is_gone = seen() is None", out=("is_gone",)) == {"is_gone": True}


@pytest.mark.slow
def test_ranks_out_of_step_say_so_with_their_numbers_and_names_can_still_be_had(ranks: Make) -> None:
    us = ranks(SETUP)
    us.cell("y = 3\nif accelerator.process_index: 1 / 0\naccelerator.wait_for_everyone()")
    assert isinstance(us.error, ZeroDivisionError)
    assert us.persistent.trouble == (
        "the ranks are out of step since Cell In[1], and the next collective could hang "
        "(rank 0: 2 collectives; rank 1: 1 collective)"
    )
    assert us.pull("y", rank=1) == {"y": 3}


@pytest.mark.slow
def test_the_collectives_of_ddp_are_counted_too_and_rank_0_is_kept(ranks: Make) -> None:
    """Rank 0 waits inside torch, where it hears no interrupt, for gradients of a rank that has failed."""
    us = ranks(SETUP)
    us.cell("import torch\nmodel = accelerator.prepare(torch.nn.Linear(2, 2)); kept = 1")
    us.cell("if accelerator.process_index: 1 / 0\naccelerator.backward(model(torch.ones(1, 2)).sum())")
    assert isinstance(us.error, ZeroDivisionError)
    assert us.persistent.trouble == (
        "rank 1 of 2 had to leave, because rank 0 waited for it where nothing else would have ended its waiting, "
        "in Cell In[1]"
    )
    assert us.persistent.alive == [0]
    assert us.pull("kept") == {"kept": 1}


def test_a_cell_on_some_ranks_leaves_the_others_alone_and_speaks_by_its_first(ranks: Make) -> None:
    us = ranks()
    us.cell("y = 0")
    assert us.cell("y += 1", out=("y",), without=[0]) == {"y": 1}
    assert us.pull("y") == {"y": 0}


def test_a_collective_that_lacks_ranks_is_an_error_before_it_begins_and_the_ranks_stay_in_step(ranks: Make) -> None:
    us = ranks(SETUP)
    us.cell("accelerator.wait_for_everyone()", without=[1])
    assert "rank 1 takes no part in this cell. Nothing was exchanged. Run the cell without --only" in str(us.error)
    us.cell("import torch\nmodel = accelerator.prepare(torch.nn.Linear(2, 2))")
    us.cell("accelerator.backward(model(torch.ones(1, 2)).sum())", without=[0])
    assert "(backward), which all ranks must enter, and rank 0 takes no part" in str(us.error)
    assert us.persistent.trouble == ""
    us.cell("accelerator.wait_for_everyone()")
    assert us.error is None


def test_a_prepared_model_comes_back_as_the_user_wrote_it_and_goes_on_in_the_ranks(ranks: Make) -> None:
    us = ranks(SETUP)
    us.cell("import torch\nmodel = torch.nn.Linear(2, 2)\nprepared = accelerator.prepare(model)")
    for _ in range(2):
        came = us.cell("accelerator.backward(prepared(torch.ones(1, 2)).sum())", out=("model", "prepared"))
        assert us.error is None
        assert "forward" not in vars(came["model"])
        assert type(came["prepared"]).__name__ == "Linear"
    assert us.persistent.trouble == ""


def test_random_numbers_go_on_from_cell_to_cell(ranks: Make) -> None:
    us = ranks()
    first = us.cell("import random; random.seed(0); a = random.random(); b = random.random()", out=("a", "b"))
    us.cell("random.seed(0); a = random.random()")
    assert us.cell("b = random.random()", out=("b",))["b"] == first["b"]


def test_sys_exit_ends_the_cell_and_not_the_ranks(ranks: Make) -> None:
    us = ranks()
    us.cell("import sys; sys.exit(3)")
    assert "called sys.exit(3) or exit(), which ends the cell and not the ranks" in str(us.error)
    assert us.persistent.alive == [0, 1]


@pytest.mark.parametrize("when", ["busy", "idle"])
def test_a_dead_rank_is_named_and_the_names_of_the_other_can_still_be_had(ranks: Make, when: str) -> None:
    us = ranks()
    us.cell("y = 4")
    if when == "busy":
        us.cell("import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
        assert isinstance(us.error, RankDied)
        assert "Its variables are gone, those of ranks that live are not." in str(us.error)
        assert us.persistent.trouble == "rank 1 of 2 was killed by SIGKILL in Cell In[1]"
    else:
        pidfd = os.pidfd_open(us.persistent.pids[1])
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)
        assert us.persistent.trouble == "rank 1 of 2 was killed by SIGKILL while it had nothing to do"
    assert us.persistent.alive == [0]
    assert us.pull("y") == {"y": 4}


class _PressAtOnce(Pollable):
    def __init__(self, times: int) -> None:
        self._left = times

    def due_in(self, now: float) -> float | None:
        return 0.0 if self._left else None

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        for _ in range(self._left):
            interrupt()
        self._left = 0


def test_a_press_stops_the_cell_and_the_names_stay(ranks: Make) -> None:
    us = ranks(y=1)
    us.cell("import threading\ny += 1\nthreading.Event().wait()", beside=[_PressAtOnce(1)])
    assert us.ended is not None
    assert us.ended.is_interrupted
    assert us.cell("y += 1", out=("y",)) == {"y": 3}


def test_a_rank_that_does_not_listen_is_ended_and_the_other_stays(ranks: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_NO_STEP_S", 0.1)
    monkeypatch.setattr(shutdown, "_PATIENCE_S", 0.5)
    us = ranks()
    us.cell(
        "import os, signal, threading\n"
        "y = 5\n"
        "if os.environ['RANK'] == '1': signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])\n"
        "threading.Event().wait()\n",
        beside=[_PressAtOnce(1)],
    )
    assert us.persistent.trouble == "rank 1 of 2 did not listen and had to be ended in Cell In[1]"
    assert us.pull("y") == {"y": 5}


def test_two_presses_end_the_ranks(ranks: Make) -> None:
    us = ranks()
    us.cell("import threading\nthreading.Event().wait()", beside=[_PressAtOnce(2)])
    assert us.persistent.alive == []


def test_training_that_is_stopped_goes_on_in_the_next_cell(ranks: Make) -> None:
    us = ranks(SETUP)
    us.cell(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "model, optimizer, loader = accelerator.prepare(\n"
        "    model, optimizer, torch.utils.data.DataLoader(torch.ones(8, 4), 2))\n"
        "steps = 0\n"
        "def epoch():\n"
        "    global steps\n"
        "    for x in loader:\n"
        "        accelerator.backward(model(x).sum()); optimizer.step(); optimizer.zero_grad(); steps += 1\n"
    )
    us.cell("while True: epoch()", timeout_s=0.2)
    assert us.ended is not None
    assert us.ended.is_timed_out
    assert us.persistent.trouble == ""
    done = [us.pull("steps", rank=rank)["steps"] for rank in range(WORLD_SIZE)]
    assert done[0] == done[1]
    us.cell("epoch()")
    assert us.error is None
    assert us.pull("steps")["steps"] == done[0] + 2


def test_what_a_thread_prints_between_two_cells_is_shown_with_the_next(
    ranks: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    us = ranks()
    us.cell(
        "import threading, os\n"
        "has_printed, may_print = threading.Event(), threading.Event()\n"
        "def speak():\n"
        "    may_print.wait()\n"
        "    print('x' * 100, flush=True)\n"
        "    has_printed.set()\n"
        "thread = threading.Thread(target=speak, daemon=True)\n"
        "thread.start()\n"
    )
    us.cell("threading.Timer(0.01, may_print.set).start()")
    us.cell("assert has_printed.wait(30)")
    assert "x" * 100 in capfd.readouterr().out


def test_a_thread_that_floods_the_output_between_two_cells_hangs_nothing(ranks: Make) -> None:
    us = ranks()
    us.cell(
        "import threading\n"
        "def flood():\n"
        "    for _ in range(100): print('y' * 50_000)\n"
        "thread = threading.Thread(target=flood, daemon=True)\n"
        "thread.start()\n"
    )
    us.cell("thread.join(30); is_over = not thread.is_alive()", out=("is_over",))
    assert us.cell("is_over", out=("is_over",))["is_over"]


def test_other_ranks_hold_nothing_of_those_that_stay(ranks: Make) -> None:
    """A forked rank with a copy of a channel's end would keep the others from noticing that the kernel let go."""
    from nbaccel.launching.api import launch

    us = ranks()
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in us.persistent.fds}

    def others() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [link for link in links if link in held]

    assert launch(others, 2, start_method="fork").values == [[], []]
    us.cell("x = 1")
    assert us.error is None


def test_ranks_that_fail_to_settle_leave_nothing(launcher: Launcher, start_method: str) -> None:
    with pytest.raises(Exception, match="nothing_there"):
        Ranks(launcher, start_method, "nbaccel.train.setup:nothing_there", {})


def _missing(us: Ranks) -> dict[str, str]:
    report = us.ended.reports[0] if us.ended else None
    return {} if report is None else report.missing


DEVICE = "devicelike:setup_rank"
NET = """
import torch, torch.distributed as dist, devicelike
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda moves: 0.5**moves)
net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
losses = []
def step():
    loss = net(torch.ones(2, 4) * (1 + accelerator.process_index)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.gather(loss.detach()).mean()))
def weights():
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
"""
HEARS = """
import time
from nbaccel.base.aborting import is_aborted
end = time.monotonic() + 20
while not is_aborted() and time.monotonic() < end: time.sleep(0.01)
hears = is_aborted()
"""
WAITS = {
    "gather": "accelerator.gather(torch.ones(1))",
    "torch": "total = torch.ones(1); dist.all_reduce(total, async_op=True).wait(); seen = float(total)",
    "behind a step": (
        "total = torch.ones(4)\n"
        "dist.all_reduce(total, async_op=True)\n"
        "devicelike.world().later(lambda: accelerator.unwrap_model(net).weight.data.add_(total))\n"
        "scheduler.step()\n"
        "devicelike.world().drain()"
    ),
}
"""Where rank 0 is when rank 1 fails; what is queued there in the last case is a step upon half a sum."""


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_rank_0_is_woken_from_its_device_when_another_fails_and_the_next_cell_trains(ranks: Make, wait: str) -> None:
    """From the state that the rank that failed has: rank 0 may have stepped on half a sum."""
    us = ranks(DEVICE)
    us.cell(NET)
    us.cell("step()\nbefore = weights()", out=("before",))
    assert us.error is None
    code = "\n    ".join(WAITS[wait].splitlines())
    us.cell(f"if accelerator.process_index: 1 / 0\nelse:\n    {code}")
    assert isinstance(us.error, ZeroDivisionError)
    assert us.persistent.alive == [0, 1]
    assert us.persistent.trouble == ""
    assert us.persistent.news == (
        "the next cell connects them anew, and trains on from what rank 1 has; until then pull from rank 1"
    )
    us.cell(HEARS, out=("hears",), without=[0])
    assert us.pull("hears", rank=1) == {"hears": True}  # also a rank that has nothing to do, for NCCL needs all
    assert us.pull("losses") == {}
    assert _missing(us) == {
        "losses": "this rank was woken in an exchange to which a peer did not come, and may hold parts of a sum"
    }
    before = us.pull("before", rank=1)["before"]

    us.cell("with torch.no_grad(): net(torch.ones(1, 4))\nafter = weights()\nstep()\nlast = weights()")
    assert us.error is None
    for rank in range(WORLD_SIZE):
        assert us.pull("after", rank=rank)["after"] == before
    told = [us.pull("last", "losses", rank=rank) for rank in range(WORLD_SIZE)]
    assert told[0]["last"] == told[1]["last"] != before
    assert told[0]["losses"] == told[1]["losses"]
    us.cell("rates = scheduler.get_last_lr()")
    assert [us.pull("rates", rank=rank)["rates"] for rank in range(WORLD_SIZE)] == [[0.1 * 0.5**4]] * 2
    assert us.persistent.news == ""


@pytest.mark.slow
def test_what_the_notebook_prepared_for_itself_does_not_keep_ranks_from_being_connected_anew(ranks: Make) -> None:
    own = Accelerator()
    own.prepare(torch.nn.Linear(4, 1))
    us = ranks(DEVICE, own=own)
    us.cell(NET)
    us.cell("if accelerator.process_index: 1 / 0\naccelerator.gather(torch.ones(1))")
    us.cell("step()")
    assert us.error is None
    assert own._lifecycle.everything_prepared


@pytest.mark.slow
def test_ranks_none_of_which_can_be_followed_are_not_connected_anew(ranks: Make) -> None:
    us = ranks(DEVICE)
    us.cell("import torch, devicelike\nfrom nbaccel.launching.rank import lifetime\nlifetime._FAILED_S = 0.2")
    us.cell(
        "group = devicelike.world()\n"
        "if accelerator.process_index: group.later(group.wait_for_abort); 1 / 0\n"
        "accelerator.gather(torch.ones(1))"
    )
    assert us.persistent.trouble.endswith(
        "and they cannot be begun anew: of no rank is it known that it is as its last whole step left it"
    )


@pytest.mark.slow
def test_ranks_that_were_not_asked_are_connected_anew_by_the_next_cell(ranks: Make) -> None:
    us = ranks(DEVICE)
    us.cell(NET)
    us.cell("if accelerator.process_index: 1 / 0\naccelerator.gather(torch.ones(1))")
    news = us.persistent.news
    assert news
    us.notebook["lock"] = threading.Lock()
    with pytest.raises(CannotSend, match="lock"):
        us.push("lock")
    assert us.persistent.news == news
    us.cell("step()")
    assert us.error is None
    assert us.persistent.news == ""


TORN = """
torn = torch.optim.SGD(net.parameters(), 0.1)
def update(optimizer, args, kwargs):
    with torch.no_grad(): accelerator.unwrap_model(net).weight.mul_(2)
    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 MiB.')
torn.register_step_post_hook(update)
"""


@pytest.mark.slow
def test_a_rank_that_failed_within_an_optimizers_step_is_not_the_one_to_follow(ranks: Make) -> None:
    us = ranks(DEVICE)
    us.cell(NET + TORN)
    us.cell("step()\nbefore = weights()", out=("before",))
    us.cell("if accelerator.process_index: torn.step()\nelse:\n    accelerator.gather(torch.ones(1))")
    assert type(us.error).__name__ == "OutOfMemoryError"
    assert us.persistent.trouble.endswith("of no rank is it known that it is as its last whole step left it")


@pytest.mark.parametrize("hears", [False, True])
def test_rank_0_is_given_the_time_that_an_abort_takes_before_the_others_leave(hears: bool) -> None:
    page = ControlPage.create(2)
    first, other = SimpleNamespace(is_working=True, stays=True, rank=0), SimpleNamespace(is_working=False, stays=True)
    other.rank = 1
    for member in (first, other):
        member.has_ended, member.released_at = False, None
        member.interrupt = member.kill = member.release = lambda *args: None
        member.process = SimpleNamespace(queued_s=lambda: 0.0)
    if hears:
        page.hear_cuts(0)
    untangling = shutdown.RecoverPersistent([first, other], 100.0, page)  # type: ignore[list-item]
    told = []
    for now in (100.3, 100.6, 101.5, 112.0):
        untangling.advance(now)
        told.append((page.is_cut, other.stays))
    page.close()
    assert told == [(False, True), (True, True), (True, hears), (True, False)]


@pytest.mark.slow
def test_ranks_that_cannot_be_connected_anew_say_why(ranks: Make) -> None:
    us = ranks(DEVICE)
    us.cell("import torch, torch.distributed as dist\nown = dist.new_group([0, 1])")
    us.cell("if accelerator.process_index: 1 / 0\naccelerator.gather(torch.ones(1))")
    assert isinstance(us.error, ZeroDivisionError)
    assert us.persistent.trouble == (
        "the exchanges between the ranks were ended in Cell In[1], since one of them did not come while others waited "
        "for it in their devices, and they cannot be begun anew: 1 process group(s) of the program's own (new_group, a "
        "device mesh) are lost in rank 0; 1 process group(s) of the program's own (new_group, a device mesh) are lost "
        "in rank 1"
    )
    assert us.persistent.alive == [0, 1]
