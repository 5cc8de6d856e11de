from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace

import pytest

from nbaccel.base.events import (
    CallEntered,
    CallsEnded,
    CollectiveEntered,
    ExchangeLeft,
    GroupRenewed,
    StepEntered,
    StepsEnded,
    Waiting,
)
from nbaccel.errors import CollectiveMismatch, PeerFailed, RunStopped
from nbaccel.launching.ipc.control import ControlPage, StepGate, position_number
from nbaccel.launching.ipc.peer_watch import PeerWatch


def test_positions_order_by_training_step_then_by_batches_since() -> None:
    numbers = [position_number(0), position_number(0, 5), position_number(1), position_number(2, 1)]
    assert numbers == sorted(numbers)


def test_no_rank_waits_while_nobody_asked_to_stop() -> None:
    page = ControlPage.create(2)
    gate = StepGate(page, 1)
    for step in range(3):
        gate(StepEntered(step))
    assert page.read(1).entered == position_number(2)
    assert page.read(1).in_step
    page.close()


def test_the_answer_is_the_highest_step_that_any_rank_entered() -> None:
    page = ControlPage.create(2)
    first, second = StepGate(page, 0), StepGate(page, 1)
    for step in range(5):
        first(StepEntered(step))
    for step in range(3):
        second(StepEntered(step))
    assert page.stop() == position_number(4)
    second(StepEntered(3))
    second(StepEntered(4))
    with pytest.raises(RunStopped, match="before step 5"):
        second(StepEntered(5))
    with pytest.raises(RunStopped):
        first(StepEntered(5))
    page.close()


def test_a_parked_rank_does_not_count_the_step_it_has_not_entered() -> None:
    page = ControlPage.create(1)
    gate = StepGate(page, 0)
    gate(StepEntered(0))
    page._map[0] = 1  # the flag alone: the kernel has not answered yet
    outcome: list[BaseException] = []

    def enter() -> None:
        try:
            gate(StepEntered(1))
        except RunStopped as stopped:
            outcome.append(stopped)

    thread = threading.Thread(target=enter)
    thread.start()
    while not page.read(0).parked:
        time.sleep(0.001)
    assert page.stop() == position_number(0)
    thread.join(5)
    assert outcome
    page.close()


def test_all_ranks_end_after_the_same_step_whenever_the_stop_comes() -> None:
    for delay_s in (0.0, 0.003, 0.007, 0.011):
        page = ControlPage.create(3)
        meeting = threading.Barrier(3)
        last = [-1, -1, -1]

        def train(rank: int, page: ControlPage = page, meeting: threading.Barrier = meeting, last=last) -> None:
            gate, step = StepGate(page, rank), 0
            try:
                while True:
                    gate(StepEntered(step))
                    meeting.wait(5)
                    time.sleep(0.001 * rank)
                    last[rank] = step
                    step += 1
            except RunStopped:
                pass

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(delay_s)
        page.stop()
        for thread in threads:
            thread.join(5)
        assert len(set(last)) == 1, last
        page.close()


def test_a_rank_that_left_its_loop_is_in_no_step() -> None:
    page = ControlPage.create(1)
    gate = StepGate(page, 0)
    gate(StepEntered(0))
    gate(StepsEnded())
    assert not page.read(0).in_step
    page.close()


def test_a_program_that_handles_interrupts_is_called_once_at_the_step_and_goes_on() -> None:
    page = ControlPage.create(1)
    gate, called = StepGate(page, 0), []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        gate(StepEntered(0))
        assert page.stop(hands_over=True) == 0
        for step in range(1, 4):
            gate(StepEntered(step))
        assert called == [signal.SIGINT]
        assert page.has_heard(0)
        page.resume()
        gate(StepEntered(4))
        assert page.stop() == position_number(4), "the second press"
        with pytest.raises(RunStopped):
            gate(StepEntered(5))
    finally:
        signal.signal(signal.SIGINT, before)
        page.close()


def test_asking_twice_gives_the_first_answer() -> None:
    page = ControlPage.create(1)
    gate = StepGate(page, 0)
    gate(StepEntered(0))
    assert page.stop() == page.stop() == 0
    page.close()


def test_a_rank_waits_for_those_that_are_busy_and_for_those_that_finished_after_they_had_entered_too() -> None:
    page = ControlPage.create(3)
    watches = [PeerWatch(page, rank) for rank in range(3)]
    for watch in watches:
        watch(CollectiveEntered())
    page.finish(2)
    watches[0](Waiting("gather", 0.5))  # rank 2 took part in this one, and rank 1 is still to come
    page.close()


def test_a_rank_that_waits_for_one_that_finished_before_is_told_both_sides() -> None:
    page = ControlPage.create(3)
    watches = [PeerWatch(page, rank) for rank in range(3)]
    for watch in watches:
        watch(CollectiveEntered())
    page.finish(2)
    watches[0](CollectiveEntered())
    with pytest.raises(CollectiveMismatch, match="rank 0 of 3") as caught:
        watches[0](Waiting("gather float32[2]", 0.5))
    assert "  rank 0: gather float32[2]\n  rank 2: has finished, and will not come" in str(caught.value)
    page.close()


def test_ranks_that_form_their_group_again_count_alike_from_there() -> None:
    page = ControlPage.create(2)
    stayed, left = (PeerWatch(page, rank) for rank in range(2))
    for _ in range(3):
        stayed(CollectiveEntered())  # in an attempt that the other rank gave up before
    for watch in (stayed, left):
        watch(GroupRenewed(1))
        watch(CollectiveEntered())
    page.finish(1)
    stayed(Waiting("gather", 0.5))  # rank 1 took part in this one
    stayed(CollectiveEntered())
    with pytest.raises(CollectiveMismatch, match="rank 1: has finished"):
        stayed(Waiting("gather", 0.5))
    page.close()


def test_no_rank_enters_or_waits_after_a_peer_has_left_its_collective_half_way() -> None:
    page = ControlPage.create(3)
    watches = [PeerWatch(page, rank) for rank in range(3)]
    for watch in watches:
        watch(CollectiveEntered("loss.backward()"))
    watches[0](ExchangeLeft("loss.backward()"))
    with pytest.raises(PeerFailed, match=r"rank 1 of 3 waits in loss.backward.., and rank 0 has left a collective"):
        watches[1](Waiting("loss.backward()", 0.5))
    with pytest.raises(PeerFailed, match=r"rank 2 of 3 was about to enter gather, .*out of step"):
        watches[2](CollectiveEntered("gather"))
    assert page.collectives(0) == 1
    page.stop()
    watches[1](Waiting("loss.backward()", 1.0))  # the kernel interrupts it
    with pytest.raises(RunStopped):
        watches[1](CollectiveEntered("gather"))
    page.close()


def test_a_group_that_is_formed_again_knows_nothing_of_a_collective_that_was_left_before() -> None:
    page = ControlPage.create(2)
    left, stayed = (PeerWatch(page, rank) for rank in range(2))
    left(CollectiveEntered("gather"))
    left(ExchangeLeft("gather"))
    stayed(GroupRenewed(1))
    stayed(CollectiveEntered("forming the process group"))
    left(GroupRenewed(1))
    left(CollectiveEntered("forming the process group"))
    stayed(Waiting("forming the process group", 0.5))
    page.close()


def test_the_later_of_two_ranks_that_make_different_calls_sees_it_before_anything_is_sent() -> None:
    page = ControlPage.create(2)
    first, second = (PeerWatch(page, rank) for rank in range(2))
    first(CollectiveEntered("loss.backward()"))
    with pytest.raises(CollectiveMismatch, match="rank 1 of 2 was about to enter gather, and rank 0 is in another"):
        second(CollectiveEntered("gather"))
    with pytest.raises(CollectiveMismatch, match=r"rank 0 of 2 waits in loss.backward"):
        first(Waiting("loss.backward()", 0.5))
    page.close()


def test_calls_that_the_ranks_compare_themselves_are_not_compared_here() -> None:
    page = ControlPage.create(2)
    first, second = (PeerWatch(page, rank) for rank in range(2))
    first(CollectiveEntered("gather", is_compared=True))
    second(CollectiveEntered("reduce sum", is_compared=True))  # their own message has the shapes, too
    first(Waiting("gather", 0.5))
    page.close()


def test_a_count_of_collectives_leaves_a_ranks_position_alone() -> None:
    page = ControlPage.create(2)
    gate, watch = StepGate(page, 1), PeerWatch(page, 1)
    gate(StepEntered(3))
    before = page.read(1)
    watch(CollectiveEntered())
    page.finish(1)
    watch(StepEntered(4))
    assert page.read(1) == before
    assert page.finished_before(1) == []
    assert page.finished_before(2) == [1]
    page.close()


def test_a_rank_in_calls_is_asked_to_leave_without_waiting_for_a_handshake() -> None:
    page = ControlPage.create(2)
    gate, asked = StepGate(page, 0), []
    for done in range(3):
        gate(CallEntered(done, lambda: asked.append("too early")))
    assert page.read(0).in_step
    assert page.calls(0) == 2
    assert not asked
    assert page.stop() == -1  # no step: another rank does not go on to where this one is
    gate(CallEntered(2, lambda: asked.append("stop")))
    assert asked == ["stop"]
    gate(CallsEnded())
    assert not page.read(0).in_step
    page.close()


def test_the_longest_call_is_the_time_to_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ControlPage.create(1)
    gate, now = StepGate(page, 0), 1.0
    monkeypatch.setattr("nbaccel.launching.ipc.control.time", SimpleNamespace(monotonic=lambda: now))
    for done, seconds in ((0, 5.0), (1, 20.0), (2, 300.0), (2, 1.0), (3, 0.0)):  # 300 s it waited for work
        gate(CallEntered(done, lambda: None))
        now += seconds
    assert page.read(0).last_step_s == 20.0
    page.close()


def test_after_a_map_in_a_step_the_rank_is_in_that_step() -> None:
    page = ControlPage.create(1)
    gate = StepGate(page, 0)
    gate(StepEntered(7))
    gate(CallEntered(0, lambda: None))
    gate(CallsEnded())
    assert page.read(0).in_step
    assert page.read(0).entered == position_number(7)
    page.close()
