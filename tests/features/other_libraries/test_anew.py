"""Objects that this process did not make are set up anew before they are used, and nothing is written into them."""

from __future__ import annotations

import copy
import gc
import pickle
from functools import cached_property
from typing import Any

import pytest

from nbaccel.errors import NotInRanks
from nbaccel.features.other_libraries.existing_world import SetUpAnew, names_in, refuse


def _watch(anew: SetUpAnew, kind: type) -> None:
    for change in anew.watch(kind):
        change()


def watched(renewed: list[Any], world: int = 2) -> type:
    """A class of a library that asks for its world once, as it is in a rank."""

    class Library:
        def __init__(self) -> None:
            self.world = world

        @cached_property
        def device(self) -> str:
            return f"device of {world}"

    def renew(value: Any) -> None:
        renewed.append(value)
        value.world = world
        vars(value).pop("device", None)

    _watch(SetUpAnew(("world", "device"), renew), Library)
    return Library


def from_elsewhere(kind: type, **values: object) -> Any:
    """As a pickle, a copy or a fork brings it: nobody calls `__init__`."""
    value = kind.__new__(kind)
    vars(value).update(values)
    return value


def test_an_object_that_came_is_set_up_once_before_it_is_read() -> None:
    renewed: list[Any] = []
    value = from_elsewhere(watched(renewed), world=1, device="device of 1")
    assert (value.device, value.world, value.device) == ("device of 2", 2, "device of 2")
    assert renewed == [value]


def test_an_object_that_came_is_set_up_before_it_is_written() -> None:
    renewed: list[Any] = []
    value = from_elsewhere(watched(renewed), world=1, device="device of 1")
    value.world = 3
    assert (value.world, value.device) == (3, "device of 2")
    assert renewed == [value]


def test_an_object_that_is_made_here_is_left_alone_and_has_nothing_of_ours() -> None:
    renewed: list[Any] = []
    kind = watched(renewed)
    value = kind()
    assert (value.world, value.device) == (2, "device of 2")  # type: ignore[attr-defined]
    assert vars(value) == {"world": 2, "device": "device of 2"}
    del value.world  # type: ignore[attr-defined]
    assert not hasattr(value, "world")
    with pytest.raises(AttributeError):
        del value.world  # type: ignore[attr-defined]
    assert renewed == []
    assert isinstance(kind.device, cached_property)  # type: ignore[attr-defined]


def test_copies_and_subclasses_are_objects_of_their_own() -> None:
    renewed: list[Any] = []
    kind = watched(renewed)
    below = type("Below", (kind,), {})
    value = from_elsewhere(below, world=1)
    assert value.world == 2
    vars(value)["world"] = 1
    assert copy.deepcopy(value).world == 2
    assert len(renewed) == 2


def test_another_object_at_the_same_address_is_not_taken_for_the_first() -> None:
    renewed: list[Any] = []
    kind = watched(renewed)
    for _ in range(50):
        value = from_elsewhere(kind, world=1)
        assert value.world == 2
        del value
        gc.collect(0)
    assert len(renewed) == 50


def test_what_is_refused_is_refused_at_every_use_with_the_line_to_move() -> None:
    class Trainer:
        pass

    _watch(SetUpAnew(("accelerator",), lambda value: refuse(value, "it is alone")), Trainer)
    value = from_elsewhere(Trainer, accelerator="one")
    for _ in range(2):
        with pytest.raises(
            NotInRanks, match=r"it is alone\. Move the line `trainer = Trainer\(\.\.\.\)` into this cell"
        ):
            _ = value.accelerator


def test_names_are_found_in_functions_inside_of_functions() -> None:
    def constructor(args: Any) -> Any:
        return [lambda: args.world_size for _ in range(2)]

    assert "world_size" in names_in(constructor.__code__)
    assert "process_index" not in names_in(constructor.__code__)


def test_an_object_that_is_pickled_says_what_it_said() -> None:
    value = _Plain()
    _watch(SetUpAnew(("world",), lambda came: None), _Plain)
    try:
        assert vars(pickle.loads(pickle.dumps(value))) == {"world": 1}
    finally:
        del _Plain.world  # type: ignore[attr-defined]


class _Plain:
    def __init__(self) -> None:
        self.world = 1
