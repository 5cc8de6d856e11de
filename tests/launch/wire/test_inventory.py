"""What a cell changes in a copy of the notebook is found, travels, and is written into the notebook's own objects.

Each cell is run three times: plainly in one namespace, in a forked process, and on what was sent to a clean one. What
the latter two leave is compared with what the first one does, the ways in which objects are shared among them.
"""

from __future__ import annotations

import collections
import gc
import os
import random
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.launch.wire.channel import Channel
from nbaccel.launch.wire.inventory import Inventory, Place, found_at, writes_of
from nbaccel.launch.wire.kind import Change
from nbaccel.launch.wire.parcel import pack, pack_what_can_travel, unpack, unpack_what_can_be_rebuilt

STARTS = ("fork", "zygote")

IMPORTS = """
import collections, copy, functools, random, torch
import numpy as np
from torch import nn
torch.manual_seed(0)
"""

SEED = "torch.manual_seed(1)"
"""Above each cell: what one draws in one process, the others would draw after it."""

NETWORK = """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
def train(model, optimizer, steps=3):
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss
"""

CELLS: dict[str, tuple[str, str]] = {
    "assigned": ("", "a = 1; b = [a, 2]; c = {'b': b}"),
    "rebound": ("a = [1]; b = a", "a = [2]"),
    "bound to another of the notebook's": ("a = [1]; b = 0", "b = a; a.append(2)"),
    "deleted": ("a = 1; b = 2", "del a"),
    "augmented": ("a = [1]; b = a; n = 1", "a += [2]; n += 1"),
    "unpacked": ("", "(a, *b), c = (1, 2, 3), 4"),
    "walrus": ("", "if (a := 3) > 2: b = a"),
    "global in a function": ("def f():\n    global n\n    n = 5", "f()"),
    "a function and a class": ("", "def f(x): return x + 1\nclass A:\n    n = 2\na = A(); a.m = 3"),
    "an import": ("", "import json as j; from math import pi"),
    "a list of lists": ("a = [[1], [2]]; b = a[1]", "a[1].append(3); a.append(a[0])"),
    "a list cut short": ("a = [1, 2, 3, 4]; b = a", "del a[1:3]"),
    "a dictionary": ("a = {'x': 1, 'y': 2}; b = a", "a['z'] = 3; del a['x']; a['x'] = 4"),
    "a default dictionary": ("a = collections.defaultdict(list); a['x']", "a['x'].append(1); a['y'].append(2)"),
    "an ordered dictionary": ("a = collections.OrderedDict(x=1, y=2)", "a.move_to_end('x')"),
    "a counter": ("a = collections.Counter('aab')", "a.update('bbc')"),
    "a set": ("a = {1, 2}; b = a", "a.add(3); a.discard(1)"),
    "a deque": ("a = collections.deque([1, 2], maxlen=3)", "a.extend([3, 4])"),
    "bytes": ("a = bytearray(b'abc')", "a[1] = 0"),
    "keys that are objects": (
        "class K: pass\nk = K(); a = {k: [1], (1, 2): [2]}",
        "a[k].append(2); a[(1, 2)].append(3); a[K()] = 5",
    ),
    "an object": ("class A: pass\na = A(); a.x = [1]; a.y = 2", "a.x.append(2); a.z = a.x; del a.y"),
    "an object that holds itself": ("class A: pass\na = A(); a.me = a", "a.other = [a, a.me]"),
    "slots": ("class A:\n    __slots__ = ('x', 'y')\na = A(); a.x = 1", "a.y = [a.x]; a.x = 2"),
    "an object that becomes another": ("class A: pass\nclass B: pass\na = A()", "a.__class__ = B; a.x = 1"),
    "attributes of a class": ("class A:\n    n = 0\n    seen = []", "A.n += 1; A.seen.append(A.n); A.new = 'x'"),
    "a list of a class of its own": ("class L(list): pass\na = L([1]); a.note = 'old'", "a.append(2); a.note = 'new'"),
    "a closure": (
        "def make():\n    n = [0]; m = 0\n    def f():\n        nonlocal m\n        m += 1; n.append(m); return m\n"
        "    return f\nf = make()",
        "a = f(), f()",
    ),
    "a default argument": ("def f(x, seen=[]):\n    seen.append(x); return seen", "a = f(1)"),
    "attributes of a function": ("def f(): f.calls += 1\nf.calls = 0", "f(); f()"),
    "a method and a partial": (
        "class A:\n    def __init__(self): self.n = []\n    def add(self, x): self.n.append(x)\n"
        "m = A().add; p = functools.partial(lambda a, b: a.append(b), [])",
        "m(1); p(2)",
    ),
    "an array": ("a = np.zeros(10); b = np.arange(6).reshape(2, 3).T; c = a", "a[3:] = 7; b[0, 1] = 9"),
    "an array of objects": ("a = np.array([[1], 'x', None], dtype=object)", "a[0].append(2); a[2] = a[0]"),
    "a large array": ("a = np.zeros(3_000_001)", "a[1_234_567] = 1"),
    "a table": (
        "import pandas as pd\na = pd.DataFrame({'x': [1, 2, 3], 'y': list('abc')}); b = a.x.copy(); c = a",
        "a['z'] = a.x * 2; a.loc[1, 'y'] = 'q'; del a['x']; b[2] = 9",
    ),
    "a table with other rows": (
        "import pandas as pd\na = pd.DataFrame({'x': [3, 1, 2]}, index=list('abc'))",
        "a.loc['d'] = [7]; a.index = list('wxyz')",
    ),
    "numbers of NumPy": (
        "class A: best = np.float32(1)\na = {'n': np.int64(3)}", "A.best = np.float32(2); a['n'] += 1"
    ),
    "data classes and named tuples": (
        "import dataclasses\nP = collections.namedtuple('P', 'x y')\n@dataclasses.dataclass\nclass D:\n    n: int = 0\n"
        "    seen: list = dataclasses.field(default_factory=list)\nd = D(); p = P([1], 2)",
        "d.n += 1; d.seen.append(d.n); p.x.append(2)",
    ),
    "a tensor": ("a = torch.zeros(5); b = a", "a[2] = 1; a += 1"),
    "a tensor by its data": ("a = torch.zeros(5)", "a.data[2] = 1"),
    "a large tensor": ("a = torch.zeros(3_000_001)", "a.numpy()[1_234_567] = 1"),
    "a tensor of another shape": ("a = torch.zeros(2)", "a.data = torch.ones(3)"),
    "tensors of all types": (
        "kinds = torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float64\n"
        "a = [torch.zeros(3, dtype=kind) for kind in kinds]\n"
        "b = torch.tensor(0); c = torch.zeros(2, 3).t(); d = torch.zeros(2, 0)",
        "for t in a: t[1] = 1\nb.fill_(3); c[0, 1] = 1",
    ),
    "a bare parameter": (
        "w = torch.ones(3, requires_grad=True)",
        "(w ** 2).sum().backward()\nwith torch.no_grad(): w -= 0.1 * w.grad",
    ),
    "frozen and thawed": ("m = nn.Linear(2, 2)", "m.weight.requires_grad_(False); m.eval()"),
    "a model": (NETWORK, "loss = train(model, optimizer)"),
    "a fused optimizer": (
        NETWORK + "optimizer = torch.optim.AdamW(model.parameters(), fused=True)", "loss = train(model, optimizer)"
    ),
    "momentum and a scheduler": (
        NETWORK + "optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
        "for _ in range(2): loss = train(model, optimizer); schedule.step()",
    ),
    "trained twice": (NETWORK + "train(model, optimizer)", "loss = train(model, optimizer)"),
    "a model in an object": (
        NETWORK + "class Trainer:\n    def __init__(self, *has): self.has, self.log = has, []\n"
        "    def fit(self): self.log.append(train(*self.has).item()); self.n_ = 1\n"
        "trainer = Trainer(model, optimizer); del model, optimizer",
        "trainer.fit()",
    ),
    "a model that is made in a method": (
        NETWORK + "class Net:\n    def fit(self): self.module_ = nn.Linear(4, 2); "
        "self.optimizer_ = torch.optim.SGD(self.module_.parameters(), 0.1); self.loss_ = train(self.module_, "
        "self.optimizer_).item()\nnet = Net()",
        "net.fit()",
    ),
    "attributes of a model": (NETWORK, "model.history = [1]; model.extra = nn.Linear(2, 2); model[0].note = 'x'"),
    "a layer is replaced": (NETWORK, "model[3] = nn.Linear(8, 3); before = model[3].weight.detach().clone()"),
    "an average of a model": (
        NETWORK + "average = copy.deepcopy(model)",
        "train(model, optimizer)\nwith torch.no_grad():\n"
        "    for a, p in zip(average.parameters(), model.parameters()): a.lerp_(p, 0.5)",
    ),
    "the best state": (
        NETWORK, "train(model, optimizer); best = copy.deepcopy(model.state_dict()); train(model, optimizer)"
    ),
    "a state that is the model's memory": (NETWORK, "best = model.state_dict(); first = model[0].weight.data[0]"),
    "tied weights": (
        "m = nn.ModuleDict({'a': nn.Linear(3, 3), 'b': nn.Linear(3, 3)}); m.b.weight = m.a.weight",
        "with torch.no_grad(): m.a.weight += 1",
    ),
    "a lazy layer": ("m = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())", "out = m(torch.ones(4, 2))"),
    "two models": (
        NETWORK + "other = nn.Linear(4, 2); its = torch.optim.SGD(other.parameters(), 0.1)",
        "train(model, optimizer); train(other, its)",
    ),
    "random generators": (
        "r = random.Random(0); g = np.random.default_rng(0); s = np.random.RandomState(0); t = torch.Generator()",
        "a = r.random(), g.random(), s.rand(), torch.rand(1, generator=t)",
    ),
    "a running estimate": ("n = nn.BatchNorm1d(3, affine=False)", "n(torch.ones(4, 3)); n(torch.zeros(4, 3))"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked process has none of the threads that its parent computes with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(code: str) -> dict[str, Any]:
    """The names of a notebook that has run `code`."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS + code, namespace)
    return namespace


def left_by(cell: str, namespace: dict[str, Any], inventory: Inventory) -> tuple[Any, dict[str, str], list[str]]:
    """In the rank: the parcel of what `cell` leaves, what cannot travel, and the names that are gone."""
    before = dict(namespace)
    exec(cell, namespace)
    new = {name: value for name, value in namespace.items() if before.get(name, before) is not value}
    new.pop("__builtins__", None)
    changes = {f"change:{number}": change for number, change in enumerate(inventory.changes())}
    values = {f"name:{name}": value for name, value in new.items()} | changes
    parcel, refused = pack_what_can_travel(values, namespace=namespace, places=inventory)
    return parcel, refused, [name for name in before if name not in namespace]


def taken(fd: int, gone: list[str], namespace: dict[str, Any]) -> dict[str, str]:
    """In the notebook: what came becomes that of `namespace`; what could not, with the reason."""
    values, refused = unpack_what_can_be_rebuilt(
        fd, namespace=namespace, placed=lambda token: found_at(Place(*token), namespace)
    )
    os.close(fd)
    writes, unwritten = writes_of({key: value for key, value in values.items() if type(value) is Change}, namespace)
    for write in writes:
        write()
    namespace |= {key.removeprefix("name:"): value for key, value in values.items() if key.startswith("name:")}
    for name in gone:
        del namespace[name]
    return refused | unwritten


def run_elsewhere(cell: str, namespace: dict[str, Any], start: str) -> dict[str, str]:
    """Run `cell` in a copy of `namespace`, and bring what it leaves back; the reasons for what did not come."""
    names = [name for name in namespace if not name.startswith("__")]
    if start == "zygote":
        sent = pack({name: namespace[name] for name in names}, namespace=namespace)
        there: dict[str, Any] = {"__name__": "__main__"}
        there |= unpack(sent.fd, namespace=there)
        os.close(sent.fd)
        parcel, refused, gone = left_by(cell, there, Inventory(names, there, is_copy=False))
        return refused | taken(parcel.fd, gone, namespace)
    kernel, rank = Channel.pair()
    if (pid := os.fork()) == 0:
        try:
            parcel, refused, gone = left_by(cell, namespace, Inventory(names, namespace))
            rank.send({"refused": refused, "gone": gone}, [parcel.fd])
        except BaseException as error:
            rank.send({"error": repr(error)})
        finally:
            os._exit(0)
    rank.close()
    frame = kernel.receive()
    kernel.close()
    os.waitpid(pid, 0)
    assert frame is not None
    message, fds = frame
    assert "error" not in message, message
    return dict(message["refused"]) | taken(fds[0], message["gone"], namespace)


def described(namespace: dict[str, Any]) -> list[Any]:
    """All that the names of a namespace lead to, in a form in which two notebooks are equal or not.

    An object that was met before is a number: so shared objects are shared in both.
    """
    seen: dict[int, int] = {}
    kept: list[Any] = []

    def of(value: Any) -> Any:
        if isinstance(value, types.ModuleType | types.BuiltinFunctionType | torch.dtype | torch.device | np.dtype):
            return str(value)
        if value is None or isinstance(value, int | float | str | bytes | complex | np.generic | torch.Size):
            return type(value).__name__, repr(value)
        if id(value) in seen:
            return "seen", seen[id(value)]
        seen[id(value)] = len(seen)
        kept.append(value)
        return type(value).__name__, *parts(value)

    def parts(value: Any) -> Iterator[Any]:
        match value:
            case torch.Tensor():
                yield (
                    value.dtype,
                    tuple(value.shape),
                    value.requires_grad and value.is_leaf,
                    value.detach().reshape(-1).tolist(),
                )
            case torch.Generator():
                yield value.get_state().tolist()
            case np.ndarray():
                yield str(value.dtype), value.shape, [of(each) for each in value.ravel().tolist()]
            case np.random.Generator():
                yield repr(value.bit_generator.state)
            case type() if value.__module__ == "__main__":
                own = {name: each for name, each in vars(value).items() if not name.startswith("_")}
                yield from ((name, of(each)) for name, each in own.items())
            case type():
                yield value.__qualname__
            case types.FunctionType():
                yield value.__code__.co_code, of(value.__defaults__), of(vars(value))
                if value.__module__ == "__main__":
                    yield [of(cell.cell_contents) for cell in value.__closure__ or ()]
            case types.MethodType():
                yield of(value.__self__), value.__name__
            case _ if type(value).__name__ in ("DataFrame", "Series"):
                yield value.to_json(), list(value.index), str(getattr(value, "dtypes", ""))
            case _ if type(value).__module__ == "random":
                yield value.getstate()
            case _ if type(value).__name__ == "RandomState":
                yield repr(value.get_state())
            case _:
                if isinstance(value, dict):
                    yield [(of(key), of(each)) for key, each in value.items()]
                elif isinstance(value, set | frozenset):
                    yield sorted(map(repr, value))
                elif isinstance(value, list | tuple | collections.deque | bytearray):
                    yield [of(each) for each in value]
                attributes = {
                    name: each for name, each in getattr(value, "__dict__", {}).items() if name not in SKIPPED
                }
                yield [(name, of(each)) for name, each in sorted(attributes.items())]
                yield [(name, of(getattr(value, name, None))) for name in getattr(type(value), "__slots__", ())]

    return [(name, of(value)) for name, value in sorted(namespace.items()) if not name.startswith("__")]


SKIPPED = ("step", "_opt_called", "_warned_capturable_if_run_uncaptured")
"""What schedulers put around the step of an optimizer, and what no copy of an optimizer has."""


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


def made_and_run(before: str, cell: str) -> dict[str, bool]:
    """For each name, whether the plain cell leaves it the object that it was."""
    namespace = made(before)
    objects = dict(namespace)
    exec(cell, namespace)
    return {name: namespace.get(name) is objects[name] for name in objects if not name.startswith("__")}


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
    assert inventory.unlooked == []
    list.append(members, Hostile())
    (change,) = inventory.changes()
    assert Place(*change.token).name == "c"


def test_names_for_which_there_is_no_time_are_told_and_still_known() -> None:
    notebook = {"small": [1], "large": [[number] for number in range(2000)], "late": [2]}
    inventory = Inventory(notebook, notebook, seconds=0.0)
    assert inventory.unlooked == ["small", "large", "late"]
    assert str(inventory.place(notebook["late"])) == "late"
    assert Inventory(notebook, notebook).unlooked == []


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
    notebook: dict[str, Any] = {"a": np.zeros(3), "b": [[1]], "c": [1]}
    rank: dict[str, Any] = {"a": np.ones(3), "b": [[1, 2]], "c": [1, 2]}
    inventory = Inventory(rank, rank, is_copy=False)
    rank["a"][0], rank["c"][0] = 5, 5
    rank["b"][0].append(3)
    changes = {Place(*change.token).name: change for change in inventory.changes()}
    notebook["a"], notebook["b"] = np.zeros(4), []
    writes, refused = writes_of(changes, notebook)
    assert refused == {"a": "it was float64[4], and is float64[3]", "b": "list index out of range"}
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
    assert [Place(*change.token).name for change in inventory.changes()] == ["a"]


def test_what_cannot_be_compared_is_told() -> None:
    class Odd(np.random.Generator):
        bit_generator = property(Hostile.ask)  # type: ignore[assignment]

    notebook: dict[str, Any] = {"a": [1], "b": Odd(np.random.PCG64()), "c": random.SystemRandom()}
    inventory = Inventory(notebook, notebook)
    notebook["a"].append(2)
    assert [Place(*change.token).name for change in inventory.changes()] == ["a"]
    assert inventory.unlooked == ["b"]


def test_no_class_of_the_notebook_is_kept() -> None:
    notebook = made("class A:\n    __slots__ = ('x',)\na = A(); a.x = 1")
    inventory = Inventory(notebook, notebook)
    notebook["a"].x = 2
    writes, refused = writes_of({"a": next(inventory.changes())}, notebook)
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
