"""Places of a sweep: cards in use by others are left out, and each slot has its own."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from nbaccel.base.hardware import Gpu, Survey
from nbaccel.errors import LaunchRefused
from nbaccel.features.sweep.slots import choose_slots

_CARDS = tuple(Gpu(number, f"GPU-{number}", "Tesla T4", 16 * 10**9, number=number) for number in range(4))


def machine(*, used: tuple[int, ...] = (), cards: tuple[Gpu, ...] = _CARDS) -> Survey:
    gpus = [replace_(gpu, ((4711, 2 * 10**9),)) if gpu.index in used else gpu for gpu in cards]
    return Survey(gpus=tuple(gpus), cpu_count=8)


def replace_(gpu: Gpu, processes: tuple[tuple[int, int], ...]) -> Gpu:
    return replace(gpu, processes=processes, used_bytes=2 * 10**9)


def test_there_are_as_many_slots_as_free_cards() -> None:
    chosen = choose_slots(None, 1, None, False, machine(used=(1,)), name_of=lambda pid: "python")
    assert [str(slot) for slot in chosen.slots] == ["GPU 0", "GPU 2", "GPU 3"]
    assert chosen.notes == ("left out: GPU 1, in use by process 4711 (python)",)
    assert [slot.devices.environ()["CUDA_VISIBLE_DEVICES"] for slot in chosen.slots] == ["0", "2", "3"]


def test_a_run_of_two_cards_has_two_ranks_or_one_if_asked_for() -> None:
    chosen = choose_slots(None, 2, None, False, machine())
    assert [str(slot) for slot in chosen.slots] == ["GPU 0, 1", "GPU 2, 3"]
    assert [slot.devices.num_processes for slot in chosen.slots] == [2, 2]
    one = choose_slots(None, 2, None, False, machine(), ranks=1).slots[0].devices
    assert (one.num_processes, len(one.gpus)) == (1, 2)


def test_named_cards_are_used_whoever_uses_them_too() -> None:
    chosen = choose_slots(None, 1, "1,3", False, machine(used=(1,)))
    assert [str(slot) for slot in chosen.slots] == ["GPU 1", "GPU 3"]
    assert chosen.notes == ()


def test_a_card_that_this_process_uses_is_free() -> None:
    mine = replace(_CARDS[0], processes=((os.getpid(), 10**9),), used_bytes=10**9)
    assert len(choose_slots(None, 1, None, False, machine(cards=(mine,))).slots) == 1


def test_a_process_that_is_not_visible_and_holds_next_to_nothing_uses_no_card() -> None:
    idle = replace(_CARDS[0], processes=((99, None),), used_bytes=10**6)
    assert len(choose_slots(None, 1, None, False, machine(cards=(idle,))).slots) == 1


def test_no_free_card_is_one_sentence() -> None:
    with pytest.raises(LaunchRefused, match=r"no card is free: GPU 0 in use by process 4711; .*--devices 0\), or use"):
        choose_slots(None, 1, None, False, machine(used=(0, 1, 2, 3)))
    with pytest.raises(LaunchRefused, match="1 card free, and each run takes 2"):
        choose_slots(None, 2, None, False, machine(used=(0, 1, 2)))
    with pytest.raises(
        LaunchRefused, match=r"3 slots of 2 cards were asked for, and 4 cards can be used: use --slots 2"
    ):
        choose_slots(3, 2, None, False, machine())


def test_cards_that_cannot_be_told_apart_do_not_run_side_by_side() -> None:
    nameless = tuple(replace(gpu, uuid="", number=None) for gpu in _CARDS[:2])
    with pytest.raises(LaunchRefused, match="use --slots 1"):
        choose_slots(None, 1, None, False, machine(cards=nameless))
    assert len(choose_slots(1, 1, None, False, machine(cards=nameless)).slots) == 1


def test_on_cpus_there_is_one_slot_or_as_many_as_asked_for_and_never_more_than_runs() -> None:
    assert len(choose_slots(None, 1, None, True, machine()).slots) == 1
    chosen = choose_slots(3, 2, None, True, machine(), most=2)
    assert [str(slot) for slot in chosen.slots] == ["slot 1", "slot 2"]
    assert chosen.slots[0].devices.num_processes == 2
    assert chosen.slots[0].devices.hides_gpus
