"""Values that notebooks hold, among them some that never end: run in a kernel, it binds each to a name of the notebook.

It is no module of the tests: its text is a cell, so its classes are the notebook's. `ZOO` has the values by name, and
each is a variable, too: "lock" is `z_lock`. `ABSENT` says which values are left out, since a library is not installed.
"""

import array
import collections
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import itertools
import logging
import mmap
import pathlib
import re
import socket
import tempfile
import threading
import time
import types
import uuid
import warnings
import weakref
from typing import Any
from unittest import mock

ZOO: dict[str, Any] = {}
ABSENT: list[str] = []


def kept(*libraries: str):
    """Put what the decorated function makes into the zoo, under its name, if all `libraries` are there."""

    def keep(make):
        try:
            modules = [importlib.import_module(library) for library in libraries]
        except ImportError as error:
            ABSENT.append(str(error))
            return make
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make(*modules)
        if isinstance(made, dict) and made.pop("several", False):
            ZOO.update(made)
        else:
            ZOO[make.__name__] = made
        return make

    return keep


# Numbers, arrays, tables ---------------------------------------------------------------------------------------------


@kept("numpy")
def _(np):
    return {
        "several": True,
        "int64": np.int64(3),
        "float32": np.float32(0.5),
        "boolean": np.bool_(True),
        "complex": np.complex128(1j),
        "time64": np.datetime64("2026-11-22"),
        "text": np.str_("text"),
        "zero_d": np.array(1.5),
        "zero_d_object": np.array({"a": [1]}, dtype=object),
        "objects": np.array([{"a": 1}, [2], "3", None], dtype=object),
        "structured": np.zeros(3, [("x", float), ("n", int)]),
        "record": np.zeros(3, [("x", float), ("o", object)])[0],
        "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
        "memmap": np.memmap(tempfile.NamedTemporaryFile(delete=False).name, float, "w+", shape=(4,)),
        "generator": np.random.default_rng(0),
        "dtype": np.dtype(float),
        "ufunc": np.add,
        "nditer": np.nditer(np.zeros(3)),
        "flat": np.zeros(3).flat,
    }


@kept("pandas")
def _(pd):
    frame = pd.DataFrame({"x": [1.0, 2.0], "s": ["a", None], "t": pd.to_datetime(["2026-01-01", "2026-01-02"])})
    return {
        "several": True,
        "frame": frame,
        "series": frame["s"],
        "timestamp": pd.Timestamp("2026-11-22"),
        "category": frame["x"].astype("category"),
        "grouped": frame.groupby("x"),
    }


@kept()
def _():
    return {
        "several": True,
        "date": datetime.datetime(2026, 11, 22, tzinfo=datetime.timezone.utc),  # noqa: UP017
        "decimal": decimal.Decimal("0.1"),
        "fraction": fractions.Fraction(1, 3),
        "array": array.array("d", [0.0] * 10),
        "large_range": range(10**12),
        "uuid": uuid.UUID(int=1),
        "path": pathlib.Path("x"),
        "huge_integer": 10**5000,
        "ellipsis": ...,
    }


@kept("scipy.sparse", "numpy")
def sparse_matrix(sparse, np):
    return sparse.csr_matrix(np.eye(3))


@kept("PIL.Image")
def image(pil):
    return pil.new("RGB", (4, 4))


@kept("matplotlib.figure")
def figure(module):
    made = module.Figure()
    made.add_subplot().plot([1, 2], [3, 4])
    return made


@kept("matplotlib.figure")
def axes(module):
    return module.Figure().add_subplot()


@kept("sklearn.ensemble")
def estimator(ensemble):
    return ensemble.RandomForestClassifier(2).fit([[0.0], [1.0]], [0, 1])


@kept("networkx")
def graph(networkx):
    return networkx.path_graph(5)


# torch ---------------------------------------------------------------------------------------------------------------


@kept("torch")
def _(torch):
    dataset = torch.utils.data.TensorDataset(torch.arange(4.0))
    graph = torch.ones(2, requires_grad=True).exp()
    values = {
        "several": True,
        "tensor": torch.arange(4.0),
        "zero_d_tensor": torch.tensor(1.5),
        "sparse": torch.eye(3).to_sparse(),
        "sparse_csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.zeros(10**9, device="meta"),
        "with_graph": graph,
        "lazy_parameter": torch.nn.UninitializedParameter(),
        "lazy_layer": torch.nn.LazyLinear(3),
        "module": torch.nn.Linear(2, 2),
        "optimizer": torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1),
        "loader": torch.utils.data.DataLoader(dataset),
        "iterator_of_loader": iter(torch.utils.data.DataLoader(dataset)),
        "torch_generator": torch.Generator(),
        "storage": torch.zeros(3).untyped_storage(),
        "torch_dtype": torch.float32,
        "conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    try:
        values["quantized"] = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    except (AttributeError, RuntimeError) as error:
        ABSENT.append(f"quantized ({error})")
    return values


# Things that live in one process -------------------------------------------------------------------------------------


def _numbers():
    yield from itertools.count()


ENDS_WITH_ZOO = []  # what stands behind the weak references


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@kept()
def _():
    ENDS_WITH_ZOO.append(Plain(a=1))
    here, there = socket.socketpair()
    there.close()
    return {
        "several": True,
        "numbers": _numbers(),
        "counter": itertools.count(),
        "cycled": itertools.cycle([1]),
        "zipped": zip(itertools.count(), itertools.count()),
        "lock": threading.Lock(),
        "held_by_attribute": Plain(lock=threading.Lock()),
        "thread": threading.Thread(target=print),
        "thread_local": threading.local(),
        "event": threading.Event(),
        "open_file": tempfile.TemporaryFile(),
        "text_in_memory": io.StringIO("text"),
        "socket": here,
        "memory_map": mmap.mmap(-1, 100),
        "view": memoryview(b"abc"),
        "reference": weakref.ref(ENDS_WITH_ZOO[0]),
        "weak_proxy": weakref.proxy(ENDS_WITH_ZOO[0]),
        "dead_proxy": weakref.proxy(Plain()),
        "weak_dict": weakref.WeakValueDictionary(a=ENDS_WITH_ZOO[0]),
        "logger": logging.getLogger("zoo"),
        "context_variable": contextvars.ContextVar("zoo"),
        "context": contextvars.copy_context(),
        "mapping_proxy": types.MappingProxyType({"a": 1}),
        "module_of_python": re,
        "pattern": re.compile("a+"),
        "match": re.match("a", "a"),
        "builtin_method": [].append,
        "partial": functools.partial(print, 1),
        "cached": functools.lru_cache(lambda: 1),
        "closed_over": (lambda number: lambda: number)(1),
        "default_dict": collections.defaultdict(list, a=[1]),
        "counted": collections.Counter("aab"),
        "queue": collections.deque([1, 2], 2),
        "chained": collections.ChainMap({"a": 1}),
        "error": ValueError("text"),
    }


class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int)]


@kept()
def _():
    return {
        "several": True,
        "structure": Point(1),
        "pointer": ctypes.pointer(Point(1)),
        "c_array": (ctypes.c_int * 3)(),
    }


# Classes of a notebook -----------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: int


@dataclasses.dataclass(frozen=True)
class SlottedByHand:
    """Pickles, and cannot be rebuilt: its attributes may not be set."""

    __slots__ = ("x",)
    x: int


@kept()
def _():
    return {
        "several": True,
        "colour": Colour.RED,
        "pair": Pair(1, 2),
        "slotted": Slotted(1),
        "by_hand": SlottedByHand(1),
        "plain": Plain(a=1),
    }


@kept("pydantic")
def pydantic_model(pydantic):
    return pydantic.create_model("Made", x=(int, 1))()


@kept("omegaconf")
def configuration(omegaconf):
    return omegaconf.OmegaConf.create({"a": {"b": 1}, "c": "${a.b}"})


@kept("attrs")
def of_attrs(attrs):
    return attrs.make_class("OfAttrs", ["x"])(1)


@kept("transformers")
def tokenizer_config(transformers):
    return transformers.BertConfig()


# Without an end ------------------------------------------------------------------------------------------------------


class AnyName:
    def __getattr__(self, name):
        return AnyName()


class AnyPublicName:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyPublicName()


class EndlessMapping(collections.abc.Mapping):
    def __getitem__(self, key):
        return key

    def __iter__(self):
        return itertools.count()

    def __len__(self):
        return 10**12


class EndlessSequence(collections.abc.Sequence):
    def __getitem__(self, at):
        return at

    def __len__(self):
        return 10**12


class Sleepy:
    @property
    def late(self):
        time.sleep(3600)

    def __len__(self):
        time.sleep(3600)

    __eq__ = __bool__ = __iter__ = __len__


class Deceiver:
    """Its class says that it is another."""

    def __init__(self, kind):
        object.__setattr__(self, "kind", kind)

    @property
    def __class__(self):
        return self.kind


class Unbound:
    """Stands for an object that is not there, as a request outside of a server."""

    @property
    def __class__(self):
        raise RuntimeError("working outside of a context")


class Refuses:
    def __reduce__(self):
        raise RuntimeError("not to be sent")

    def __repr__(self):
        raise RuntimeError("not to be shown")

    def __len__(self):
        raise RuntimeError("not to be counted")

    __eq__ = __bool__ = __iter__ = __len__


class RefusesSilently:
    class Error(Exception):
        def __str__(self):
            raise ValueError("no words")

    def __getstate__(self):
        raise self.Error


class ReducesForEver:
    def __reduce__(self):
        return list, ([ReducesForEver()],)


class CannotBeRebuilt:
    def __reduce__(self):
        return _raise, ()


def _raise():
    raise RuntimeError("not here")


class ShowsOddly:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "odd", "application/json": {"x": object()}, "text/html": b"<b>"}


def _ring():
    made = [1]
    made.append(made)
    return made


def _chain(length):
    made = []
    for _ in range(length):
        made = [made]
    return made


def _linked(length):
    made = None
    for _ in range(length):
        made = Plain(next=made)
    return made


@kept()
def _():
    loop = Plain()
    loop.loop = loop
    return {
        "several": True,
        "mock": mock.Mock(),
        "magic_mock": mock.MagicMock(),
        "mock_of_a_class": mock.MagicMock(spec=type),
        "any_name": AnyName(),
        "any_public_name": AnyPublicName(),
        "endless_mapping": EndlessMapping(),
        "endless_sequence": EndlessSequence(),
        "sleepy": Sleepy(),
        "deceiver": Deceiver(type),
        "deceiving_module": Deceiver(types.ModuleType),
        "unbound": Unbound(),
        "refuses": Refuses(),
        "refuses_silently": RefusesSilently(),
        "reduces_for_ever": ReducesForEver(),
        "cannot_be_rebuilt": CannotBeRebuilt(),
        "shows_oddly": ShowsOddly(),
        "ring": _ring(),
        "loop": loop,
        "chain": _chain(200_000),
        "linked": _linked(5_000),
    }


@kept("werkzeug.local")
def context_proxy(local):
    return local.LocalProxy(contextvars.ContextVar("zoo_request"))


@kept("nbaccel")
def accelerator_class(nbaccel):
    return nbaccel.Accelerator


globals().update({f"z_{name}": value for name, value in ZOO.items()})
