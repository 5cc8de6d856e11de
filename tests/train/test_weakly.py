"""A method that does not keep its object alive."""

from __future__ import annotations

import pickle
import weakref

import pytest

from nbaccel.train.checkpoint.resume import Weakly


class Owner:
    """Holds a part that calls back."""

    def __init__(self) -> None:
        self.part = Weakly(self.answer)

    def answer(self, question: str) -> tuple[int, str]:
        return id(self), question


def test_an_object_that_is_called_back_by_its_part_goes_when_it_is_dropped() -> None:
    owner = Owner()
    assert owner.part("who?") == (id(owner), "who?")
    left, part = weakref.ref(owner), owner.part
    del owner
    assert left() is None
    with pytest.raises(ReferenceError, match="the object that this method belongs to is gone"):
        part("who?")


def test_a_copy_that_travelled_is_called_back_by_its_own_part() -> None:
    copy = pickle.loads(pickle.dumps(Owner()))
    assert copy.part("who?") == (id(copy), "who?")
