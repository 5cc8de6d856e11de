"""The debugger of a rank: what it is asked, what the others do meanwhile, and how the run ends then."""

from __future__ import annotations

import builtins
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from nbaccel.errors import NoInput
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, RunEnd, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen

Answer = str | Callable[[], str]


class Typist:
    """Answers `input` from a list; remembers what was asked."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        self.prompts: list[str] = []
        self._answers: Iterator[Answer] = iter(answers)

    def __call__(self, prompt: object = "") -> str:
        self.prompts.append(str(prompt))
        answer = next(self._answers)
        return answer if isinstance(answer, str) else answer()


@pytest.fixture
def debug(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, RankResults, Typist]]:
    """Runs a function in two ranks, debugs rank 1 with the answers given, and returns how it went."""

    def run(
        function: Callable[..., Any], answers: Iterable[Answer], *, start: str = "fork", **limits: float
    ) -> tuple[Run, RankResults, Typist]:
        typist = Typist(answers)
        monkeypatch.setattr(builtins, "input", typist)
        spec = LaunchSpec(FunctionTask(function, debugged=1), Devices(2), Start(start, "a test"), end=RunEnd(**limits))  # type: ignore[arg-type]
        run, ended = launcher.run(spec, RunObservers(ConsoleScreen()))
        return run, ended, typist

    return run


def interrupt() -> str:
    """What the front end's stop button does while the kernel waits for input."""
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("the interrupt was not an exception")


def add_ranks() -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    own = torch.tensor(int(os.environ["RANK"]) + 1)
    breakpoint()
    dist.all_reduce(own)
    return int(own)


def test_the_run_goes_on_with_what_the_debugger_has_changed(debug: Any, start_method: str, capfd: Any) -> None:
    run, ended, typist = debug(add_ranks, ["p own", "own += 10", "c"], start=start_method)
    assert run.error is None
    assert [ended.values(rank)["value"] for rank in range(2)] == [13, 13]
    assert typist.prompts == ["[rank 1] (Pdb) "] * 3
    out, err = capfd.readouterr()
    assert "test_debugging.py" in out
    assert "add_ranks()" in out
    assert "tensor(2)" in out
    assert "rank 1 is in the debugger, and the others wait for it: c goes on, q ends the run." in err
    assert err.count("default 30 minutes") == 1
    ended.close()


def test_the_stack_begins_where_the_users_code_does(debug: Any, capfd: Any) -> None:
    _, ended, _ = debug(add_ranks, ["where", "c"])
    out = capfd.readouterr().out
    assert "worker.py" not in out
    assert "pytest" not in out.replace("[pytest", "")
    assert out.count("add_ranks()") == 2  # when it stops, and as the whole of `where`
    ended.close()


@pytest.mark.parametrize("leave", ["q", interrupt], ids=["q", "interrupt"])
def test_leaving_the_debugger_ends_the_run_as_an_interrupt_does(debug: Any, leave: Answer) -> None:
    run, ended, typist = debug(add_ranks, [leave])
    assert ended.is_interrupted
    assert run.error is None
    assert len(typist.prompts) == 1
    ended.close()


def fail_alike() -> None:
    secret = int(os.environ["RANK"]) + 41
    raise ValueError(f"no {secret - secret}")


def test_an_error_of_every_rank_opens_a_post_mortem_in_the_one_that_is_debugged(debug: Any, capfd: Any) -> None:
    run, ended, typist = debug(fail_alike, ["p secret", "q"])
    assert len(typist.prompts) == 2
    out = capfd.readouterr().out
    assert "ValueError: no 0\n" in out
    assert "This is the debugger after the error, with the values that it left; q ends the run." in out
    assert "\n42\n" in out.replace("[rank 1] ", "")
    assert isinstance(run.error, ValueError)
    assert not ended.is_interrupted
    ended.close()


def fail_in_a_library() -> None:
    import json

    text = "{no json"
    json.loads(text)


def test_a_post_mortem_begins_at_the_users_line_and_not_inside_a_library(debug: Any, capfd: Any) -> None:
    _, ended, _ = debug(fail_in_a_library, ["p text", "down", "q"])
    out = capfd.readouterr().out.replace("[rank 1] ", "")
    assert "fail_in_a_library()" in out
    assert "'{no json'\n" in out
    assert "json/__init__.py" in out.partition("'{no json'")[2]
    assert "json/__init__.py" not in out.partition("'{no json'")[0]
    ended.close()


def rank_0_is_killed() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(()))
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(()))


def test_a_lost_peer_opens_no_debugger(debug: Any) -> None:
    _, ended, typist = debug(rank_0_is_killed, [])
    assert typist.prompts == []
    assert ended.first_failed == 0
    ended.close()


def rank_0_fails_while_rank_1_is_looked_at() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("of rank 0")
    breakpoint()
    threading.Event().wait(30)


@pytest.mark.slow
def test_a_peers_error_ends_the_run_and_the_debugger_with_it(debug: Any) -> None:
    run, ended, _ = debug(rank_0_fails_while_rank_1_is_looked_at, ["c"])
    assert isinstance(run.error, ValueError)
    assert ended.first_failed == 0
    ended.close()


def ask_for_a_name() -> str:
    return input("name? ") if os.environ["RANK"] == "1" else ""


def test_input_of_that_rank_asks_too(debug: Any) -> None:
    _, ended, typist = debug(ask_for_a_name, ["Ada"])
    assert ended.values(1)["value"] == "Ada"
    assert typist.prompts == ["[rank 1] name? "]
    ended.close()


class Samples:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        breakpoint()
        return index


def load_in_another_process() -> list[Any]:
    from torch.utils.data import DataLoader

    return list(DataLoader(Samples(), num_workers=1))  # type: ignore[arg-type]


def test_a_breakpoint_in_a_loaders_process_says_where_it_can_be_debugged(debug: Any) -> None:
    run, ended, typist = debug(load_in_another_process, ["q"])
    assert isinstance(run.error, NoInput)
    assert "a child process of rank 1 asked for keyboard input" in str(run.error)
    assert "a loader with num_workers=0 reads its data in the rank" in str(run.error)
    assert typist.prompts == ["[rank 1] (Pdb) "]  # the post-mortem of what came of it
    ended.close()


@pytest.mark.slow
def test_time_at_the_prompt_counts_for_no_limit(debug: Any) -> None:
    limit_s = 10.0

    def think() -> str:
        threading.Event().wait(limit_s + 0.5)
        return "c"

    run, ended, _ = debug(add_ranks, [think], timeout_s=limit_s, hang_timeout_s=limit_s)
    assert run.error is None
    assert not ended.is_timed_out
    assert ended.values(0)["value"] == 3
    ended.close()
