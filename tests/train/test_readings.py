"""Readings of several devices: each is waited for where it is computed. The devices are fake, events stand in."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nbaccel.train.step.readings import LearningRates, Reading


class Event:
    """An event that is over when the test says so.  recorded: the stream that each was recorded in."""

    recorded: dict[str, Event]

    def __init__(self) -> None:
        self.is_over = self.was_waited_for = False

    def record(self, stream: str) -> None:
        self.recorded[stream] = self

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.was_waited_for = True


def test_values_of_two_gpus_are_waited_for_in_the_stream_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "recorded", {}, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    with FakeTensorMode():
        first, second = torch.empty(3, device="cuda:0"), torch.empty(2, device="cuda:1")
        reading = Reading({"a": first, "b": [second, first], "c": 1.0})
        assert sorted(Event.recorded) == ["stream of cuda:0", "stream of cuda:1"]
        assert not reading.has_arrived
        Event.recorded["stream of cuda:0"].is_over = True
        assert not reading.has_arrived
        Event.recorded["stream of cuda:1"].is_over = True
        assert reading.has_arrived
        values = reading.values()
    assert all(event.was_waited_for for event in Event.recorded.values())
    assert [values["a"].device.type, values["b"][0].device.type, values["c"]] == ["cpu", "cpu", 1.0]


def test_values_of_the_host_have_arrived_and_need_no_event() -> None:
    reading = Reading({"a": torch.tensor(0.5), "b": 1})
    assert reading.has_arrived
    assert reading.values() == {"a": 0.5, "b": 1}


def test_learning_rates_are_read_from_optimizers_that_live() -> None:
    weights = [torch.zeros(1, device="cpu") for _ in range(6)]
    groups = [{"params": [weight], "lr": 0.1 * (at // 2 + 1)} for at, weight in enumerate(weights)]
    first = torch.optim.SGD(groups)
    second = torch.optim.AdamW([weights[0]], lr=torch.tensor(0.25, device="cpu"), capturable=False, foreach=False)
    rates = LearningRates()
    for optimizer in (first, second, first):
        rates.follow(optimizer)
    assert rates.read() == (0.25, 0.1, 0.2, pytest.approx(0.3))
    first.param_groups[0]["lr"] = 0.5
    assert rates.read()[1] == 0.5
    del first, optimizer, groups
    gc.collect()
    assert rates.read() == (0.25,)
    assert pickle.loads(pickle.dumps(rates)).read() == ()


def test_an_optimizer_that_is_met_at_each_step_is_followed_once() -> None:
    one, other = (torch.optim.SGD([torch.zeros(1, device="cpu")], lr=lr) for lr in (0.1, 0.2))
    rates = LearningRates()
    for _ in range(3):
        rates.meet(one)
        rates.meet(other)
    assert rates.read() == (0.1, 0.2)
    assert len(rates._optimizers) == 2
    rates.forget()
    assert rates.read() == ()


def test_a_learning_rate_on_a_device_is_not_waited_for() -> None:
    with FakeTensorMode():
        rate = torch.empty((), device="cuda:0")
    optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    rates = LearningRates()
    rates.follow(optimizer)
    assert rates.read() == ()
