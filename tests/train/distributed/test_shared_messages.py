"""Numbers and small sums go through memory that ranks share, and what ends a wait in a collective ends that one."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from nbaccel.base.events import Event, Waiting, outlet
from nbaccel.errors import CollectiveMismatch, PeerFailed
from nbaccel.testing import run_ranks
from nbaccel.train import PartialState
from nbaccel.train.distributed import shared_messages
from nbaccel.train.distributed.collectives import GroupCollectives
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.distributed.shared_messages import SharedMessages, _Layout

LONG = 1300  # numbers, in three parts


def group() -> GroupCollectives:
    PartialState()
    assert process_group.talk is not None
    return process_group.talk


def share(talk: GroupCollectives) -> bool:
    return talk._host._messages is not None


def numbers_of(rank: int, count: int, turn: int) -> list[float]:
    return [rank + turn / 7 + at * 1e-3 for at in range(count)]


def tells_and_sums() -> tuple[bool, list[Any], list[torch.Tensor], list[torch.Tensor]]:
    talk = group()
    state = PartialState()
    told, sums, by_gloo = [], [], []
    for turn, count in enumerate([3, 40, LONG, 0, 1, 40] * 4):
        told.append(talk.tell_numbers("a header", numbers_of(state.process_index, count, turn)))
        if turn % 3:
            draw = torch.Generator().manual_seed(10 * turn + state.process_index)
            flat = torch.randn(1000 + turn, dtype=torch.float64, generator=draw)
            by_gloo.append(talk.reduce(flat))
            large = torch.ones(1 << 19)  # beside it, by the backend
            talk.finish_sums("a sum", [talk.start_sum(each, is_of_step=True) for each in (flat, large)])
            sums.append(flat)
            assert large.unique().tolist() == [state.num_processes]
            second = torch.full((5 + turn,), 1.0 + state.process_index)  # while a peer may still read the first
            talk.finish_sums("a second sum", [talk.start_sum(second, is_of_step=True)])
            assert second.unique().tolist() == [sum(range(1, state.num_processes + 1))]
    return share(talk), told, sums, by_gloo


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(8, marks=pytest.mark.full)])
def test_every_rank_gets_the_numbers_and_the_sums_of_all(world_size: int) -> None:
    ranks = run_ranks(world_size, tells_and_sums)
    for is_shared, told, sums, by_gloo in ranks:
        assert is_shared
        for turn, count in enumerate([3, 40, LONG, 0, 1, 40] * 4):
            assert told[turn] == [numbers_of(rank, count, turn) for rank in range(world_size)]
        for here, first, expected in zip(sums, ranks[0][2], by_gloo, strict=True):
            assert torch.equal(here, first), "ranks got the same sum"
            assert torch.allclose(here, expected, rtol=1e-12, atol=1e-12)


def finds_none() -> tuple[bool, list[Any], list[torch.Tensor], list[torch.Tensor]]:
    if PartialState().process_index == 1:
        shared_messages._open = lambda *where: None
    return tells_and_sums()


def test_where_one_rank_does_not_find_the_memory_all_use_the_backend() -> None:
    for is_shared, told, sums, by_gloo in run_ranks(2, finds_none):
        assert not is_shared
        assert told[1] == [numbers_of(rank, 40, 1) for rank in range(2)]
        assert all(torch.equal(*pair) for pair in zip(sums, by_gloo, strict=True))


def finds_another() -> bool:
    """As on another machine, where the number of the process and the descriptor are those of something else."""
    talk = group()
    if PartialState().process_index == 1:
        find = shared_messages._open
        shared_messages._open = lambda pid, fd, size, nonce: find(pid, fd, size, nonce + 1)
    talk.tell_numbers("a header", [1.0])
    return share(talk)


def test_memory_with_another_content_is_not_shared() -> None:
    assert run_ranks(2, finds_another) == [False, False]


def begins_again() -> list[list[float]]:
    talk = group()
    talk.tell_numbers("a header", [0.0])
    if PartialState().process_index == 1:
        assert talk._host._messages is not None
        talk._host._messages._count += 1  # as if it had left a task before the message that its peers have sent
    talk.forget_messages()
    talk.tell_numbers("a header", [1.0])
    return talk.tell_numbers("a header", [2.0 + PartialState().process_index])


def test_the_next_task_begins_anew_whatever_the_one_before_has_left() -> None:
    assert run_ranks(2, begins_again) == [[[2.0], [3.0]]] * 2


def differs() -> str:
    talk = group()
    talk.tell_numbers("a header", [0.0])
    with pytest.raises(CollectiveMismatch) as caught:
        talk.tell_numbers("a header", [1.0] * (1 + PartialState().process_index))
    return str(caught.value)


def test_messages_of_different_lengths_are_an_error_in_all_ranks() -> None:
    first, second = run_ranks(2, differs)
    assert "rank 0 of 2 has sent 8 bytes in a header (call 2 of this process group), and rank 1 has sent 16" in first
    assert "rank 1 of 2 has sent 16 bytes" in second
    assert "rank 0 has sent 8: the ranks are out of step. Every rank must make the same calls." in second


# -- one rank, whose peer does not come


def alone(peer: int, limit_s: float = 600.0) -> SharedMessages:
    """The messages of rank 0 of two.  peer: the process of the other."""
    return SharedMessages(mmap.mmap(-1, _Layout(2).size), 0, [os.getpid(), peer], limit_s)


def ignore(waited_s: float) -> None:
    """A look-up that knows of nothing."""


def test_the_wait_ends_with_the_process_of_the_peer() -> None:
    """Also where nobody has reaped it, and where a process that it has started lives on."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os.read(reading, 1)
            os._exit(0)
        signal.pause()
    try:
        timer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(PeerFailed, match=r"rank 0 of 2 waited in a header for rank 1, whose process has ended"):
            alone(pid).exchange([1.0], lambda: "a header", ignore)
        timer.join()
    finally:
        os.write(writing, b"!")
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_the_wait_ends_by_the_time_limit_of_the_groups_collectives() -> None:
    with pytest.raises(PeerFailed, match=r"waited 0.6 s for rank 1 in a header: every rank must come there"):
        alone(os.getpid(), 0.6).exchange([1.0], lambda: "a header", ignore)


def test_who_waits_asks_twice_a_second_and_the_answer_may_end_the_wait() -> None:
    asked: list[float] = []

    def look_up(waited_s: float) -> None:
        asked.append(waited_s)
        if len(asked) == 2:
            raise CollectiveMismatch("it has finished")

    with pytest.raises(CollectiveMismatch, match="it has finished"):
        alone(os.getpid()).exchange([1.0], lambda: "a header", look_up)
    assert asked[0] >= 0.5
    assert asked[1] >= 1.0


def interrupted(wait: Callable[[GroupCollectives], object]) -> tuple[str, list[str]]:
    """Rank 0 waits, until an interrupt ends it; rank 1 does not come."""
    talk, rank = group(), PartialState().process_index
    talk.tell_numbers("a header", [0.0])
    heard: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Waiting) and not heard:
            heard.append(event.call)
            os.kill(os.getpid(), signal.SIGINT)

    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with outlet(hear), pytest.raises(KeyboardInterrupt):
            wait(talk)
        with pytest.raises(CollectiveMismatch) as caught:
            talk.tell_numbers("the next header", [0.0])
        return str(caught.value), heard
    return "", heard


def summed(talk: GroupCollectives) -> None:
    talk.finish_sums("a sum", [talk.start_sum(torch.ones(3), is_of_step=True)])


@pytest.mark.parametrize(
    ("wait", "call"),
    [(lambda talk: talk.tell_numbers("a second header", [1.0]), "a second header"), (summed, "a sum")],
    ids=["numbers", "sum"],
)
def test_an_interrupt_ends_the_wait_and_nothing_is_exchanged_afterwards(
    wait: Callable[[GroupCollectives], object], call: str
) -> None:
    (refusal, heard), _ = run_ranks(2, interrupted, wait)
    assert heard == [f"{call} (call 2 of this process group)"]
    assert f"(KeyboardInterrupt) has ended its {call} half-way" in refusal


def limited() -> float:
    PartialState(timeout=timedelta(seconds=77))
    talk = group()
    talk.tell_numbers("a header", [0.0])
    assert talk._host._messages is not None
    return talk._host._messages._limit_s


def test_the_time_limit_is_the_groups() -> None:
    assert run_ranks(2, limited) == [77.0, 77.0]
