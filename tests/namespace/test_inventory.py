"""What a cell changes in a copy of the notebook is found, travels, and is written into the notebook's own objects.

Each cell is run three times: plainly in one namespace, in a forked process, and on what was sent to a clean one. What
the latter two leave is compared with what the first one does, the ways in which objects are shared among them.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from leaving import CELLS, SEED, described, made
from nbaccel.launching.ipc.channel import Channel
from nbaccel.namespace.inventory import Inventory, ObjectPlace, found_at, writes_of
from nbaccel.namespace.kind import Change
from nbaccel.namespace.payload import pack, pack_what_can_travel, unpack_what_can_be_rebuilt

STARTS = ("fork", "zygote")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked process has none of the threads that its parent computes with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def left_by(cell: str, namespace: dict[str, Any], inventory: Inventory) -> tuple[Any, dict[str, str], list[str]]:
    """In the rank: the payload of what `cell` leaves, what cannot travel, and the names that are gone."""
    before = dict(namespace)
    exec(cell, namespace)
    new = {name: value for name, value in namespace.items() if before.get(name, before) is not value}
    new.pop("__builtins__", None)
    changes = {f"change:{number}": change for number, change in enumerate(inventory.changes())}
    values = {f"name:{name}": value for name, value in new.items()} | changes
    payload, refused = pack_what_can_travel(values, namespace=namespace, places=inventory)
    return payload, refused, [name for name in before if name not in namespace]


def placed_in(namespace: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda token: found_at(ObjectPlace(*token), namespace)


def taken(fd: int, gone: list[str], namespace: dict[str, Any]) -> dict[str, str]:
    """In the notebook: what came becomes that of `namespace`; what could not, with the reason."""
    placed = placed_in(namespace)
    values, refused = unpack_what_can_be_rebuilt(fd, namespace=namespace, placed=placed)
    os.close(fd)
    writes, unwritten = writes_of({key: value for key, value in values.items() if type(value) is Change}, placed)
    for write in writes:
        write()
    namespace |= {key.removeprefix("name:"): value for key, value in values.items() if key.startswith("name:")}
    for name in gone:
        del namespace[name]
    return refused | unwritten


def run_elsewhere(cell: str, namespace: dict[str, Any], start: str) -> dict[str, str]:
    """Run `cell` in a copy of `namespace`, and bring what it leaves back; the reasons for what did not come."""
    names = [name for name in namespace if not name.startswith("__")]
    sent = pack({name: namespace[name] for name in names}, namespace=namespace) if start == "zygote" else None
    kernel, rank = Channel.pair()
    if (pid := os.fork()) == 0:
        try:
            there = namespace
            if sent is not None:
                there = {"__name__": "__main__"}
                came, lost = unpack_what_can_be_rebuilt(sent.fd, namespace=there)
                assert lost == {}
                there |= came
            payload, refused, gone = left_by(cell, there, Inventory(names, there, is_copy=sent is None))
            rank.send({"refused": refused, "gone": gone}, [payload.fd])
        except BaseException as error:
            rank.send({"error": repr(error)})
        finally:
            os._exit(0)
    rank.close()
    frame = kernel.receive()
    kernel.close()
    os.waitpid(pid, 0)
    if sent is not None:
        os.close(sent.fd)
    assert frame is not None
    message, fds = frame
    assert "error" not in message, message
    return dict(message["refused"]) | taken(fds[0], message["gone"], namespace)


@pytest.mark.sample(30)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_that_runs_elsewhere_leaves_what_the_same_cell_leaves_here(name: str, start: str) -> None:
    before, cell = CELLS[name]
    here, elsewhere = made(before), made(before)
    objects = {name: value for name, value in elsewhere.items() if name != "__builtins__"}
    cell = f"{SEED}\n{cell}"
    exec(cell, here)
    assert run_elsewhere(cell, elsewhere, start) == {}
    assert described(elsewhere) == described(here)
    stays = {name for name, value in made_and_run(before, cell).items() if value}
    assert all(elsewhere[name] is objects[name] for name in stays)


@pytest.mark.parametrize("start", STARTS)
def test_a_new_view_of_a_tensor_that_has_other_memory_now_has_the_values_from_there(start: str) -> None:
    notebook = made("a = torch.zeros(2)")
    assert run_elsewhere("a.data = torch.arange(6.0); b = a[3:]", notebook, start) == {}
    assert (notebook["a"].tolist(), notebook["b"].tolist()) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 4.0, 5.0])


def made_and_run(before: str, cell: str) -> dict[str, bool]:
    """For each name, whether the plain cell leaves it the object that it was."""
    namespace = made(before)
    objects = dict(namespace)
    exec(cell, namespace)
    return {name: namespace.get(name) is objects[name] for name in objects if not name.startswith("__")}


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", CELLS)
def test_what_nobody_touched_is_as_before(name: str) -> None:
    notebook = made(CELLS[name][0])
    assert list(Inventory(notebook, notebook).changes()) == []


class Hostile:
    """An object whose every answer is code of the user's."""

    def ask(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the user's code ran")

    __getattribute__ = __getattr__ = __len__ = __iter__ = __eq__ = __bool__ = __repr__ = ask
    __hash__ = __sizeof__ = __reduce__ = __getstate__ = __setattr__ = ask
    __class__ = __dict__ = property(ask)


class HostileDict(dict[str, Any]):
    items = values = keys = __iter__ = __len__ = __getitem__ = __eq__ = Hostile.ask


class HostileList(list[Any]):
    __iter__ = __len__ = __getitem__ = __eq__ = Hostile.ask


def test_looking_and_comparing_run_no_code_of_the_users() -> None:
    members = HostileList([Hostile()])
    notebook = {"a": Hostile(), "b": HostileDict(x=[Hostile()]), "c": members, "d": {(1, 2): Hostile()}}
    inventory = Inventory(notebook, notebook)
    assert list(inventory.changes()) == []
    assert inventory.unlooked == {}
    list.append(members, Hostile())
    (change,) = inventory.changes()
    assert ObjectPlace(*change.token).name == "c"


def test_names_that_lead_to_too_many_objects_are_told_and_still_known() -> None:
    notebook = {"small": [1], "large": [[number] for number in range(2000)], "late": [2]}
    inventory = Inventory(notebook, notebook, most=1000)
    assert inventory.unlooked == {"large": "more than 1,000 objects: name it in --out"}
    assert str(inventory.place(notebook["large"][1999])) == "large[1999]"
    assert Inventory(notebook, notebook).unlooked == {}
    notebook["late"].append(3)
    assert [ObjectPlace(*change.token).name for change in inventory.changes()] == ["late"]


class Trainer:
    """A training deep inside of an object that has the data too."""

    def __init__(self, samples: int) -> None:
        self.data = [[number] for number in range(samples)]
        self.parts = [{"of": self._training()}]

    def _training(self) -> dict[str, Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "free": torch.zeros(2, requires_grad=True)}


@pytest.mark.parametrize("most", [5, 100, 2000])
def test_what_was_trained_is_found_whatever_else_there_is(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it depend on the load of the machine: a clock that jumps changes nothing."""
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    notebook: dict[str, Any] = {"data": [{"x": [number]} for number in range(3000)], "trainer": Trainer(3000)}
    inventory = Inventory(notebook, notebook, most=most)
    assert "data" in inventory.unlooked
    training = notebook["trainer"].parts[0]["of"]
    (training["model"](torch.ones(1, 2)).sum() + training["free"].sum()).backward()
    training["optimizer"].step()
    with torch.no_grad():
        training["free"] += 1
    places = [str(ObjectPlace(*change.token)) for change in inventory.changes()]
    assert len([place for place in places if ".parts[0]['of']['model']" in place]) == 40
    assert {place.partition("['of']")[2] for place in places if "model" not in place} == {
        "['optimizer'].state", "['free']"
    }  # fmt: skip


def test_of_attributes_that_cannot_travel_the_others_come() -> None:
    notebook = made("class A: pass\na = A(); b = [1]; c = {}")
    refused = run_elsewhere(
        "import threading\na.lock = threading.Lock(); a.n = 1; b.append(i for i in b); c['x'] = 2", notebook, "fork"
    )
    assert notebook["a"].n == 1
    assert not hasattr(notebook["a"], "lock")
    assert notebook["b"] == [1]
    assert notebook["c"] == {"x": 2}
    assert sorted(reason.split()[1] for reason in refused.values()) == ["generator", "lock"]
    assert any(key.endswith(":lock") for key in refused)


def test_what_the_notebook_has_changed_meanwhile_is_not_written_over() -> None:
    notebook: dict[str, Any] = {"a": np.zeros(3), "b": [[1]], "c": [1, 2], "d": [1, 2]}
    rank: dict[str, Any] = {"a": np.ones(3), "b": [[1, 2]], "c": [1, 2], "d": [1, 2]}
    inventory = Inventory(rank, rank, is_copy=False)
    rank["a"][0], rank["c"][0] = 5, 5
    rank["b"][0].append(3)
    rank["d"].append(3)
    changes = {ObjectPlace(*change.token).name: change for change in inventory.changes()}
    notebook["a"], notebook["b"] = np.zeros(4), []
    notebook["d"].append("meanwhile")
    writes, refused = writes_of(changes, placed_in(notebook))
    assert refused == {
        "a": "it was float64[4], and is float64[3]",
        "b": "b[0] is not there any more",
        "d": "the notebook has changed it meanwhile",
    }
    for write in writes:
        write()
    assert notebook["c"] == [5, 2]


def test_an_object_of_another_address_is_another_object() -> None:
    notebook = {"a": [1]}
    inventory = Inventory(notebook, notebook)
    place = inventory.place(notebook["a"])
    assert place is not None
    assert found_at(place, notebook) is notebook["a"]
    with pytest.raises(LookupError, match="a is another object by now"):
        found_at(place, {"a": [1]})


def test_places_read_as_one_would_write_them() -> None:
    notebook = made(
        "class A: pass\na = A(); a.b = {'x': [1, [2]]}\nm = nn.Linear(1, 1); s = nn.Sequential(nn.Linear(1, 1))"
    )
    inventory = Inventory(notebook, notebook)
    assert str(inventory.place(notebook["a"].b["x"][1])) == "a.b['x'][1]"
    assert str(inventory.place(notebook["m"].weight)) == "m.weight"
    assert str(inventory.place(notebook["s"][0].bias)) == "s[0].bias"
    assert inventory.place([2]) is None


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_two_elements_of_a_large_array_that_change_places_are_a_change(kind: str) -> None:
    numbers = np.arange(1_000_000)
    notebook = {"a": numbers if kind == "array" else torch.from_numpy(numbers)}
    inventory = Inventory(notebook, notebook)
    numbers[[7, 8]] = numbers[[8, 7]]
    assert [ObjectPlace(*change.token).name for change in inventory.changes()] == ["a"]


def test_a_tensor_of_one_element_without_a_stride_is_compared() -> None:
    notebook = {"prior": torch.distributions.Normal(0, torch.tensor([1.0]))}
    inventory = Inventory(notebook, notebook)
    notebook["prior"].loc.set_(torch.tensor([2.0]))
    assert [str(ObjectPlace(*change.token)) for change in inventory.changes()] == ["prior.loc"]
    assert inventory.unlooked == {}


def test_what_cannot_be_compared_is_told() -> None:
    class Odd(np.random.Generator):
        bit_generator = property(Hostile.ask)  # type: ignore[assignment]

    notebook: dict[str, Any] = {"a": [1], "b": Odd(np.random.PCG64()), "c": random.SystemRandom()}
    inventory = Inventory(notebook, notebook)
    notebook["a"].append(2)
    assert [ObjectPlace(*change.token).name for change in inventory.changes()] == ["a"]
    assert list(inventory.unlooked) == ["b"]


def test_no_class_of_the_notebook_is_kept() -> None:
    notebook = made("class A:\n    __slots__ = ('x',)\na = A(); a.x = 1")
    inventory = Inventory(notebook, notebook)
    notebook["a"].x = 2
    writes, refused = writes_of({"a": next(inventory.changes())}, placed_in(notebook))
    assert refused == {}
    kind = weakref.ref(notebook["A"])
    del inventory, writes, notebook["a"], notebook["A"]
    gc.collect()
    assert kind() is None


def test_looking_at_an_optimizer_whose_step_is_the_users_object_asks_it_nothing() -> None:
    notebook: dict[str, Any] = {"a": {"step": 1}}
    inventory = Inventory(notebook, notebook)
    notebook["a"]["step"] = Hostile()
    assert len(list(inventory.changes())) == 1
