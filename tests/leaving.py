"""Cells that change a notebook in all the ways there are, and what a notebook consists of in a form that compares.

For tests in this process and in kernels: whatever runs a cell elsewhere has to leave what the plain cell leaves.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

__all__ = ["CELLS", "IMPORTS", "NETWORK", "SEED", "described", "made"]

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
    "what a callback has as its globals": (
        "history = []; seen = [0]\nclass Engine:\n    def __init__(self): self.handlers = []\n"
        "    def run(self, n):\n        seen[0] += 1\n        for i in range(n):\n"
        "            for handler in self.handlers: handler(i)\n"
        "engine = Engine()\ndef log(i): history.append(i)\nengine.handlers.append(log); del log, Engine",
        "engine.run(3)",
    ),
    "a method and a partial": (
        "class A:\n    def __init__(self): self.n = []\n    def add(self, x): self.n.append(x)\n"
        "m = A().add; p = functools.partial(lambda a, b: a.append(b), [])",
        "m(1); p(2)",
    ),
    "an array": ("a = np.zeros(10); b = np.arange(6).reshape(2, 3).T; c = a", "a[3:] = 7; b[0, 1] = 9"),
    "an array of objects": ("a = np.array([[1], 'x', None], dtype=object)", "a[0].append(2); a[2] = a[0]"),
    "a large array": ("a = np.zeros(3_000_001)", "a[1_234_567] = 1"),
    "arrays of other classes": (
        "a = np.ma.masked_array([1.0, 2.0, 3.0], mask=[0, 1, 0])\n"
        "b = np.rec.array([(1, 2.0)], dtype=[('x', int), ('y', float)])",
        "a[0] = 9; a[2] = np.ma.masked; b.x[0] = 7",
    ),
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
    "gradients": (
        NETWORK + "w = torch.ones(2, requires_grad=True)",
        "nn.functional.cross_entropy(model(x), y).backward(); (w * 3).sum().backward()\n"
        "new = nn.Linear(4, 1); new(x).sum().backward(); g = new.weight.grad",
    ),
    "frozen and thawed": ("m = nn.Linear(2, 2)", "m.weight.requires_grad_(False); m.eval()"),
    "a model": (NETWORK, "loss = train(model, optimizer)"),
    "a fused optimizer": (
        NETWORK + "optimizer = torch.optim.AdamW(model.parameters(), fused=True)", "loss = train(model, optimizer)"
    ),
    "an optimizer for many tensors at once": (
        NETWORK + "optimizer = torch.optim.Adam(model.parameters(), foreach=True, amsgrad=True)",
        "loss = train(model, optimizer)",
    ),
    "a scaler": (
        NETWORK + "scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=1)",
        "loss = nn.functional.cross_entropy(model(x), y)\nscaler.scale(loss).backward()\n"
        "scaler.step(optimizer); scaler.update()",
    ),
    "adapters on a frozen model": (
        NETWORK + "class Adapter(nn.Module):\n    def __init__(self, base):\n        super().__init__()\n"
        "        self.base = base.requires_grad_(False); self.a = nn.Parameter(torch.ones(4, 2)); "
        "self.b = nn.Parameter(torch.ones(2, 8))\n"
        "    def forward(self, x): return self.base(x) + x @ self.a @ self.b",
        "model[0] = Adapter(model[0]); adapters = [p for p in model.parameters() if p.requires_grad]\n"
        "loss = train(model, torch.optim.SGD(adapters, 0.1))",
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
    "what is prepared": (
        NETWORK, "model, optimizer = accelerator.prepare(model, optimizer)\nloss = train(model, optimizer)"
    ),
    "what is prepared under other names": (
        NETWORK,
        "m, o = accelerator.prepare(model, optimizer)\nhistory = []\n"
        "for step in range(3):\n    loss = nn.functional.cross_entropy(m(x), y); history.append(loss.item())\n"
        "    accelerator.backward(loss); o.step(); o.zero_grad()\n"
        "best = accelerator.unwrap_model(m)",
    ),
    "two models": (
        NETWORK + "other = nn.Linear(4, 2); its = torch.optim.SGD(other.parameters(), 0.1)",
        "train(model, optimizer); train(other, its)",
    ),
    "random generators": (
        "r = random.Random(0); g = np.random.default_rng(0); s = np.random.RandomState(0); t = torch.Generator()",
        "a = r.random(), g.random(), s.rand(), torch.rand(1, generator=t)",
    ),
    "what is drawn next": (
        "import random as r", "torch.manual_seed(3); np.random.seed(3); r.seed(3); a = torch.rand(1), np.random.rand()"
    ),
    "a running estimate": ("n = nn.BatchNorm1d(3, affine=False)", "n(torch.ones(4, 3)); n(torch.zeros(4, 3))"),
}  # fmt: skip


class Alone:
    """The `accelerator` of a plain cell, which has nobody to train with."""

    prepare = staticmethod(lambda *objects: objects)
    backward = staticmethod(torch.Tensor.backward)
    unwrap_model = staticmethod(lambda model: model)


def made(code: str) -> dict[str, Any]:
    """The names of a notebook that has run `code`."""
    namespace: dict[str, Any] = {"__name__": "__main__", "accelerator": Alone()}
    if "pandas" in code:
        pytest.importorskip("pandas")
    exec(IMPORTS + code, namespace)
    return namespace


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
                    of(value.grad if value.is_leaf else None),
                )
            case torch.Generator():
                yield value.get_state().tolist()
            case np.ma.MaskedArray():
                yield value.data.tolist(), value.mask.tolist()
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
                yield value.__code__.co_names, of(value.__defaults__), of(vars(value))
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

    own = {name: value for name, value in namespace.items() if not name.startswith("_") and name != "accelerator"}
    return [(name, of(value)) for name, value in sorted(own.items())]


SKIPPED = ("step", "_opt_called", "_warned_capturable_if_run_uncaptured")
"""What schedulers put around the step of an optimizer, and what no copy of an optimizer has."""
