"""Decisions that the ranks take again, and those that they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nbaccel.errors import NotPrepared
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.raw_loop.agreement import Decision, Decisions, refuse_out_of_step, refuse_to_go_on_with_parts
from nbaccel.train.raw_loop.gradient_weights import Header, References, Say, Told, exchange

SAY = Say(shape=7, part=1, rows=4, whole=8, at=3, steps=3, batches=5, rates=0.1)


class Recorded(Collectives):
    """Collectives of ranks that have told something before."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def tell(self, call: str, numbers: Tensor) -> Tensor:
        self.rows.append(numbers)
        return torch.stack(self.rows)


def told(*says: Say, loss: float = 0.5, counts: tuple[float, float] = (4.0, 4.0)) -> Told:
    """What the second of two ranks hears."""
    ranks = Recorded()
    first, second = says
    exchange(ranks, "", replace(first), [(counts[0], 1.0)], [0.25])
    return exchange(ranks, "", replace(second), [(counts[1], 1.0)], [loss])


def decision() -> Decision:
    say = Say(terms=1, values=1)
    return Decision(Header([say], [[1.0]], [[1.0]], [[1.0]]), [0], [[1.0]], [False], (0,))


def test_the_next_step_is_decided_by_the_same_numbers() -> None:
    later = replace(SAY, at=4, steps=4, batches=6, rates=0.2)
    assert told(SAY, SAY).decisive() is not None
    assert told(SAY, SAY).decisive() == told(later, later, loss=0.75).decisive()


@pytest.mark.parametrize("name", ["shape", "rows", "whole", "part", "leaves", "extras", "new", "done", "gives"])
def test_another_kind_of_backward_is_decided_by_other_numbers(name: str) -> None:
    other = replace(SAY, **{name: getattr(SAY, name) - 1})
    assert told(SAY, other).decisive() != told(SAY, SAY).decisive()
    assert told(SAY, SAY, counts=(4.0, 3.0)).decisive() != told(SAY, SAY).decisive()


@pytest.mark.parametrize("name", ["at", "steps", "batches", "drawn", "noise", "lengths", "rates", "check"])
def test_ranks_out_of_step_never_decide_as_before(name: str) -> None:
    assert told(SAY, replace(SAY, **{name: 9.0})).decisive() is None


@pytest.mark.parametrize("name", ["leaves", "extras"])
def test_what_is_decided_by_a_collective_is_decided_by_all_ranks_each_time(name: str) -> None:
    """A rank that remembered it would not enter the collective of one that does not, as for a longer text."""
    assert told(SAY, replace(SAY, **{name: getattr(SAY, name) + 1})).decisive() is None


def test_a_loss_of_zero_may_be_of_no_samples_and_never_decides_as_before() -> None:
    assert told(SAY, SAY, loss=0.0).decisive() is None


def test_whole_batches_with_equal_losses_are_the_same_work_and_others_are_not() -> None:
    whole = replace(SAY, part=0)
    assert told(whole, whole, loss=0.25).decisive() != told(whole, whole, loss=0.5).decisive()


def test_a_decision_is_forgotten_once_what_it_depends_on_has_changed() -> None:
    references = References()
    decisions, one = Decisions(lambda: references.state), decision()
    assert decisions.find("causes") is None
    decisions.keep("causes", one)
    assert decisions.find("causes") is one
    assert decisions.find("others") is None
    assert decisions.find(None) is None
    references.note("term", 8.0, 8.0)
    assert decisions.find("causes") is None
    decisions.keep("causes", one)
    references.note("term", 8.0, 8.0)
    assert decisions.find("causes") is one, "it is as it was"
    references.note("term", 4.0, 4.0)
    assert decisions.find("causes") is None


def test_a_decision_that_has_changed_what_it_depends_on_is_not_taken_again() -> None:
    references = References()
    decisions = Decisions(lambda: references.state)
    assert decisions.find("causes") is None
    references.note("term", 8.0, 8.0)
    decisions.keep("causes", decision())
    assert decisions.find("causes") is None


@pytest.mark.parametrize("name", ["steps", "rates", "batches", "drawn", "check"])
def test_ranks_may_be_out_of_step_by_their_parts_of_batches(name: str) -> None:
    """They decide by an accuracy of theirs, or draw noise for the gradients: whole batches may train."""
    seen = replace(SAY, drawn=1.0, check=1.0)
    with pytest.raises(NotPrepared, match="so they do not train one any more") as caught:
        refuse_out_of_step(told(seen, replace(seen, **{name: 9.0})).header(), [0, 1])
    assert caught.value.is_of_parts
    assert caught.value.is_of_states


def test_ranks_may_have_left_a_loop_by_their_parts_of_batches() -> None:
    with pytest.raises(NotPrepared, match="is over after so many steps") as caught:
        refuse_to_go_on_with_parts(told(replace(SAY, done=1), SAY).header(), [1])
    assert caught.value.is_of_states
