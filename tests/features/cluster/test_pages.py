"""Ranks on several machines stop, and save, at one step: each machine has a copy of the control page."""

from __future__ import annotations

import time

from nbaccel.base.events import SaveAsked, SaveDue
from nbaccel.launching.ipc.control import ControlPage, StepGate, position_number


def pages() -> tuple[ControlPage, ControlPage]:
    """The kernel's page of two ranks, and the copy on the machine of rank 1."""
    kernels, nodes = ControlPage.create(2), ControlPage.create(2)
    for page in (kernels, nodes):
        page.spans_nodes = True
    return kernels, nodes


def test_a_stop_is_answered_once_it_is_known_where_the_ranks_of_all_machines_are() -> None:
    kernels, nodes = pages()
    StepGate(kernels, 0).enter_step(4, 0)
    StepGate(nodes, 1).enter_step(5, 0)
    assert kernels.stop() is None
    nodes.freeze()
    kernels.answer()
    assert kernels.stop_after is None, "nobody has said where rank 1 is"
    kernels.put_slot(1, nodes.slot(1))
    kernels.is_settled = True
    kernels.answer()
    assert kernels.stop_after == position_number(5)
    nodes.orders = kernels.orders
    assert nodes.stop_after == position_number(5)
    kernels.close()
    nodes.close()


def test_times_of_another_machine_are_those_of_its_clock() -> None:
    kernels, nodes = pages()
    before = time.monotonic()
    StepGate(nodes, 1).enter_step(1, 0)
    nodes.limit_time(1, before + 60, 60.0)
    kernels.put_slot(1, nodes.slot(1), later_s=1000.0)
    assert abs(kernels.read(1).entered_at - before - 1000) < 5
    ((at, seconds),) = kernels.time_limits()
    assert (round(at - before), seconds) == (1060, 60.0)
    kernels.close()
    nodes.close()


def test_rank_0_asks_for_a_save_and_gets_a_step_that_no_rank_has_passed() -> None:
    kernels, nodes = pages()
    gate, other = StepGate(kernels, 0), StepGate(nodes, 1)
    gate.enter_step(4, 0)
    other.enter_step(5, 0)  # it is ahead
    chosen: list[str] = []
    gate(SaveDue(5, lambda: chosen.append("elsewhere")))
    assert (chosen, kernels.save_wanted, kernels.save_before) == (["elsewhere"], True, 0)
    kernels.put_slot(1, nodes.slot(1))
    kernels.save_before, kernels.save_wanted = kernels.next_step, False
    nodes.orders = kernels.orders
    answers: list[tuple[int, int]] = []
    for step in (5, 6, 7):
        for rank, each in ((0, gate), (1, other)):
            each(SaveAsked(step, lambda step=step, rank=rank: answers.append((step, rank))))  # type: ignore[misc]
    assert answers == [(6, 0), (6, 1)]
    kernels.close()
    nodes.close()


def test_what_ranks_report_together_is_added_and_never_taken_back() -> None:
    kernels, nodes = pages()
    nodes.saves_itself = True
    kernels.add_reports(nodes.reports)
    nodes.saves_itself = False
    kernels.add_reports(nodes.reports)
    assert kernels.saves_itself
    assert not kernels.stop_wanted
    kernels.close()
    nodes.close()
