"""What a cell changes in an object is changed in the notebook, or named: no type is forgotten."""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import unseen_changes
from nbaccel.namespace import process_objects
from nbaccel.namespace.inventory import Inventory, ObjectPlace
from nbaccel.namespace.kind import CannotWrite
from nbaccel.namespace.state_in_c import Hidden, Owner, may_own_state_in_c, pickles_itself

STANDARD = {
    "file in memory": ("import io; a = io.BytesIO()", "a.write(b'x')"),
    "its position": ("import io; a = io.BytesIO(b'xyz')", "a.read(1)"),
    "its end": ("import io; a = io.BytesIO()", "a.close()"),
    "text in memory": ("import io; a = io.StringIO()", "print('x', file=a)"),
    "inside of an object": ("import io, types; a = types.SimpleNamespace(b=[io.StringIO()])", "a.b[0].write('x')"),
    "zip in memory": ("import io, zipfile; a = zipfile.ZipFile(io.BytesIO(), 'w')", "a.writestr('b', 'c')"),
    "text above memory": ("import io; a = io.TextIOWrapper(io.BytesIO())", "a.write('b'); a.flush()"),
    "gzip in memory": ("import gzip, io; a = gzip.GzipFile(fileobj=io.BytesIO(), mode='w')", "a.write(b'x')"),
    "csv": ("import csv, io; b = io.StringIO(); a = csv.writer(b)", "a.writerow([1])"),
    "spooled file": ("import tempfile; a = tempfile.SpooledTemporaryFile()", "a.write(b'x'); a.close()"),
    "queue": ("import queue; a = queue.Queue()", "a.put(1)"),
    "its items": ("import queue; a = queue.Queue(); a.put([])", "a.queue[0].append(1)"),
    "its tasks": ("import queue; a = queue.Queue(); a.put(1); a.get()", "a.task_done()"),
    "queue with priorities": ("import queue; a = queue.PriorityQueue()", "a.put(1)"),
    "simple queue": ("import queue; a = queue.SimpleQueue(); a.put(1)", "a.put(2); a.get()"),
    "queue of tasks": ("import asyncio; a = asyncio.Queue()", "a.put_nowait(1)"),
    "event": ("import threading; a = threading.Event()", "a.set()"),
    "event of tasks": ("import asyncio; a = asyncio.Event()", "a.set()"),
    "semaphore": ("import threading; a = threading.Semaphore(2)", "a.acquire()"),
    "barrier": ("import threading; a = threading.Barrier(2)", "a.abort()"),
    "lock": ("import threading; a = threading.Lock()", "a.acquire()"),
    "thread": ("import threading; a = threading.Thread(target=int)", "a.start(); a.join()"),
    "thread's values": ("import threading; a = threading.local()", "a.b = 1"),
    "variable of a context": ("import contextvars; a = contextvars.ContextVar('b')", "a.set(1)"),
    "program": ("import subprocess, sys; a = subprocess.Popen(['true'])", "a.wait()"),
    "level": ("import logging; a = logging.Logger('b')", "a.setLevel(10)"),
    "handler": ("import logging; a = logging.Logger('b')", "a.addHandler(logging.NullHandler())"),
    "level of a handler": ("import logging; a = logging.NullHandler()", "a.setLevel(10)"),
    "records": (
        "import logging.handlers; a = logging.handlers.MemoryHandler(9); b = logging.Logger('b'); b.addHandler(a)",
        "b.warning('c')",
    ),
    "generator": ("a = (b for b in range(9))", "next(a)"),
    "generator inside": ("a = (b for b in (c for c in range(9)))", "next(a)"),
    "iterator": ("a = iter([1, 2])", "next(a)"),
    "iterator's end": ("a = iter([])", "list(a)"),
    "reversed": ("a = reversed([1, 2])", "next(a)"),
    "numbers": ("a = enumerate('abc')", "next(a)"),
    "pairs": ("a = zip('abc', 'abc')", "next(a)"),
    "mapped": ("a = map(int, '123')", "next(a)"),
    "count": ("import itertools; a = itertools.count()", "next(a)"),
    "cycle": ("import itertools; a = itertools.cycle('ab')", "next(a)"),
    "chain": ("import itertools; a = itertools.chain('ab', 'c')", "next(a)"),
    "copies of an iterator": ("import itertools; a, b = itertools.tee('ab')", "next(a)"),
    "entries": ("a = iter({1: 2, 3: 4}.items())", "next(a)"),
    "defaults": ("import collections; a = collections.defaultdict(list)", "a[1].append(2)"),
    "counter": ("import collections; a = collections.Counter()", "a['b'] += 1"),
    "chained": ("import collections; a = collections.ChainMap({})", "a['b'] = 1"),
    "deque": ("import collections; a = collections.deque(maxlen=2)", "a.append(1)"),
    "array": ("import array; a = array.array('d', [0])", "a[0] = 1"),
    "view": ("a = memoryview(bytearray(4))", "a[1] = 2"),
    "view of an array": ("import array; a = memoryview(array.array('d', [0]))[:1]", "a[0] = 2"),
    "namespace": ("import types; a = types.SimpleNamespace()", "a.b = 1"),
    "random numbers": ("import random; a = random.Random(0)", "a.random()"),
    "hash": ("import hashlib; a = hashlib.sha256()", "a.update(b'x')"),
    "another hash": ("import hashlib; a = hashlib.blake2b()", "a.update(b'x')"),
    "key": ("import hmac; a = hmac.new(b'x', digestmod='sha1')", "a.update(b'x')"),
    "compressor": ("import zlib; a = zlib.compressobj()", "a.compress(b'x')"),
    "another compressor": ("import bz2; a = bz2.BZ2Compressor()", "a.compress(b'x')"),
    "third compressor": ("import lzma; a = lzma.LZMACompressor()", "a.compress(b'x' * 9)"),
    "element": ("import xml.etree.ElementTree as b; a = b.Element('c')", "b.SubElement(a, 'd')"),
    "second element": ("import xml.etree.ElementTree as b; a = b.XML('<c><d/></c>')", "b.SubElement(a, 'd')"),
    "attribute": ("import xml.etree.ElementTree as b; a = b.XML('<c e=\"f\"/>')", "a.set('g', 'h')"),
    "text": ("import xml.etree.ElementTree as b; a = b.XML('<c/>')", "a.text = 'd'"),
    "document": ("import xml.dom.minidom as b; a = b.Document()", "a.appendChild(a.createElement('c'))"),
    "precision": ("import decimal; a = decimal.Context()", "a.prec = 3"),
    "parser of arguments": ("import argparse; a = argparse.ArgumentParser()", "a.add_argument('b')"),
    "configuration": ("import configparser; a = configparser.ConfigParser()", "a.add_section('b')"),
    "message": ("import email.message; a = email.message.EmailMessage()", "a['To'] = 'b'"),
    "cookies": ("import http.cookies; a = http.cookies.SimpleCookie()", "a['b'] = 'c'"),
    "order": ("import graphlib; a = graphlib.TopologicalSorter()", "a.add(1, 2)"),
    "schedule": ("import sched; a = sched.scheduler()", "a.enter(9, 1, int)"),
    "mock": ("import unittest.mock; a = unittest.mock.Mock()", "a()"),
    "weak set": ("import weakref\nclass B: pass\na = weakref.WeakSet(); b = [B()]", "a.add(b[0])"),
    "weak values": ("import weakref\nclass B: pass\na = weakref.WeakValueDictionary(); b = [B()]", "a[1] = b[0]"),
    "partial": ("import functools; a = functools.partial(int)", "a.b = 1"),
    "syntax tree": ("import ast; a = ast.parse('1')", "a.body.clear()"),
    "pickler": ("import io, pickle; b = io.BytesIO(); a = pickle.Pickler(b)", "a.dump(1)"),
    "decoder": ("import codecs; a = codecs.getincrementaldecoder('utf8')()", "a.decode(b'\\xc3')"),
    "date": ("import calendar; a = calendar.Calendar()", "a.setfirstweekday(3)"),
}
PACKAGES = {
    "figure": ("matplotlib", "from matplotlib.figure import Figure; a = Figure(); b = a.subplots()", "b.plot([1])"),
    "title": ("matplotlib", "from matplotlib.figure import Figure; a = Figure().subplots()", "a.set_title('c')"),
    "line": (
        "matplotlib",
        "from matplotlib.figure import Figure; b = Figure().subplots(); a, = b.plot([1, 2])",
        "a.set_data([1], [2])",
    ),
    "label": ("matplotlib", "from matplotlib.figure import Figure; a = Figure().subplots()", "a.set_xlabel('c')"),
    "bar": ("tqdm", "import tqdm, io; a = tqdm.tqdm(total=9, file=io.StringIO())", "a.update(3)"),
    "widget": ("ipywidgets", "import ipywidgets; a = ipywidgets.IntProgress(max=8)", "a.value += 1"),
    "text widget": (
        "ipywidgets", "import ipywidgets; a = ipywidgets.VBox([ipywidgets.Label()])", "a.children[0].value = 'b'"
    ),
    "function of a button": ("ipywidgets", "import ipywidgets; a = ipywidgets.Button()", "a.on_click(print)"),
    "observer": ("ipywidgets", "import ipywidgets; a = ipywidgets.IntText()", "a.observe(print, 'value')"),
    "pixels": ("PIL", "from PIL import Image; a = Image.new('L', (2, 2))", "a.putpixel((0, 0), 5)"),
    "drawing": (
        "PIL", "from PIL import Image, ImageDraw as b; a = b.Draw(Image.new('L', (9, 9)))", "a.point((1, 1), 5)"
    ),
    "booster": (
        "xgboost",
        "import numpy, xgboost as b; c = b.DMatrix(numpy.ones((9, 1)), numpy.ones(9)); a = b.Booster({}, [c])",
        "a.update(c, 0)",
    ),
    "index": ("faiss", "import faiss, numpy as b; a = faiss.IndexFlatL2(2)", "a.add(b.ones((1, 2), 'f'))"),
    "matrix": ("scipy", "import scipy.sparse; a = scipy.sparse.lil_matrix((2, 2))", "a[0, 0] = 1"),
    "estimator": (
        "sklearn", "from sklearn.linear_model import LinearRegression as b; a = b()", "a.fit([[1.0], [2.0]], [1.0, 2])"
    ),
    "tree": ("sklearn", "from sklearn.tree import DecisionTreeClassifier as b; a = b()", "a.fit([[1.0], [2]], [0, 1])"),
    "graph": ("networkx", "import networkx; a = networkx.Graph()", "a.add_edge(1, 2)"),
    "loader's iterator": (
        "torch", "from torch.utils.data import DataLoader; a = iter(DataLoader([1, 2, 3]))", "next(a)"
    ),
    "meter": ("torchmetrics", "import torch, torchmetrics as b; a = b.MeanMetric()", "a.update(torch.ones(2))"),
    "table": ("pandas", "import pandas; a = pandas.DataFrame({'b': [1]})", "a.loc[0, 'b'] = 2"),
    "polynomial": ("numpy", "import numpy; a = numpy.poly1d([1, 2])", "a[0] = 5"),
    "iterator of numbers": ("numpy", "import numpy; a = numpy.arange(3).flat", "next(a)"),
    "frame": ("polars", "import polars; a = polars.DataFrame({'b': [1]})", "a.extend(a)"),
    "display": ("IPython", "from IPython.display import HTML; a = HTML('b')", "a.data = 'c'"),
}  # fmt: skip


NO_DATA = frozenset(
    {"antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3", "test", "curses"}
) | {
    *("multiprocessing", "ctypes", "webbrowser", "faulthandler", "readline", "rlcompleter", "site", "__main__"),
}
KNOWN = frozenset({"random.SystemRandom", "socket.socket", "_asyncio.Future"}) | {
    *("asyncio.base_events.BaseEventLoop", "asyncio.streams.StreamReader", "asyncio.unix_events.PidfdChildWatcher"),
    *("asyncio.unix_events.MultiLoopChildWatcher", "asyncio.unix_events._UnixSelectorEventLoop"),
    *("logging.Handler", "logging.StreamHandler"),  # another lock of the same handler
    *("weakref.WeakKeyDictionary", "doctest.DocTestRunner", "doctest.DebugRunner"),  # counts of what it has looked at
    *("configparser.ConfigParser", "configparser.RawConfigParser", "configparser.SafeConfigParser"),  # equal objects
}
"""Classes of objects that belong to their process, or whose change is no other result."""


def made(before: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(before, namespace)
    return namespace


def seen(notebook: dict[str, Any], cell: str) -> set[str]:
    """The names that `cell` has changed in `notebook`, as those that come or are named."""
    names = [name for name in notebook if not name.startswith("__")]
    inventory = Inventory(names, notebook)
    exec(cell, notebook)
    changed = {str(ObjectPlace(*change.token)) for change in inventory.changes()}
    places = changed | inventory.stayed.keys() | inventory.unlooked.keys()
    return {place.partition(".")[0].partition("[")[0] for place in places}


@pytest.mark.parametrize("name", STANDARD)
def test_what_a_cell_changes_in_an_object_of_the_standard_library_comes_or_is_named(name: str) -> None:
    before, cell = STANDARD[name]
    notebook = made(before)
    assert seen(notebook, "") == set()
    assert seen(notebook, cell) & {"a", "b"}


@pytest.mark.full
@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_cell_changes_in_an_object_of_a_package_comes_or_is_named(name: str) -> None:
    package, before, cell = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    notebook = made(before)
    assert seen(notebook, "") == set()
    assert seen(notebook, cell) & {"a", "b"}


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        pytest.param("import ctypes; a = ctypes.c_void_p(5)", "a.value", id="pointer"),
        pytest.param("import contextvars; a = contextvars.ContextVar('b', default=1)", "a.get()", id="variable"),
        pytest.param("from PIL import Image; a = Image.new('L', (2, 2))", "a.getpixel((0, 0))", id="picture"),
    ],
)
def test_what_is_only_read_is_not_named(before: str, cell: str) -> None:
    assert seen(made(before), cell) == set()


class _Arguments(dict[str, int]):
    pass


class _Model:
    def __init__(self) -> None:
        self.arguments = _Arguments(size=1)


def test_containers_of_classes_of_ones_own_are_no_pointers() -> None:
    """A Lightning module keeps its arguments in one, and is pickled in a way of its own."""
    assert Owner().mark(_Model()) is None


def test_pictures_of_more_than_a_quarter_of_a_second_are_not_compared() -> None:
    notebook = made("from PIL import Image; a = [Image.new('L', (8192, 8192)) for _ in range(3)]")
    assert seen(notebook, "a[0].putpixel((0, 0), 1)") == {"a"}
    assert seen(notebook, "a[2].putpixel((0, 0), 1)") == set()


def test_a_picture_of_more_than_a_quarter_of_a_second_is_named_where_a_name_has_it() -> None:
    notebook = made("from PIL import Image; a = Image.new('L', (16384, 8200))")
    inventory = Inventory(["a"], notebook)
    assert list(inventory.changes()) == []
    assert inventory.unlooked == {"a": "a state in C of more than 128 MB, or that cannot be sent, is not compared"}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_class_of_the_standard_library_has_objects_that_change_unseen(tmp_path: Path) -> None:
    """In a process of its own, in a folder where it may write: modules are imported that no test should have."""
    modules = sorted(sys.stdlib_module_names - NO_DATA)
    program = [sys.executable, "-W", "ignore", unseen_changes.__file__, *modules]
    found = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=500).stdout
    assert set(json.loads(found)) <= KNOWN


def test_items_that_a_thread_of_the_notebook_waits_for_are_named_and_not_delivered() -> None:
    """It would answer a request of a rank that is gone, and the next one who asks would take that answer."""
    here: queue.Queue[Any] = queue.Queue()
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(here.get()))
    thread.start()
    while not here.not_empty._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    try:
        with pytest.raises(CannotWrite, match="a thread of the notebook waits for its items"):
            process_objects._Queue().writing(here, (0, [1], 1, 0))
    finally:
        here.put(None)
        thread.join()
    assert taken == [None]


class Bound:
    """As a constraint of gpytorch: it pickles in a way of its own, and has a function among its attributes."""

    def __init__(self) -> None:
        self.transform, self.lower = abs_of, [1.0]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def abs_of(value: float) -> float:
    return abs(value)


def test_a_function_among_the_attributes_of_an_object_is_no_state_of_its_own() -> None:
    bound, kind = Bound(), Owner()
    mark = kind.mark(bound)
    bound.lower.append(2.0)
    assert may_own_state_in_c(Bound)
    assert mark is None
    assert kind.change(bound, mark) is None  # its list is compared as a list


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        pytest.param("import torch; a = torch.jit.script(torch.nn.BatchNorm1d(2))", "a(torch.ones(3, 2))", id="script"),
        pytest.param("import pandas; a = pandas.array([1, None], dtype='Int64')", "a[0] = 4", id="missing values"),
        pytest.param("import pandas; a = pandas.Series([1])", "a.name = 'b'", id="name of a column"),
        pytest.param(
            "from matplotlib import RcParams, rcParams; a = RcParams(rcParams)", "a['lines.linewidth'] = 9", id="style"
        ),
        pytest.param("from matplotlib.figure import Figure; a = Figure().subplots()", "a.set_xlim(0, 3)", id="limits"),
    ],
)
def test_what_a_cell_changes_in_a_librarys_own_way_comes_or_is_named(before: str, cell: str) -> None:
    notebook = made(before)
    assert seen(notebook, "") == set()
    assert seen(notebook, cell) == {"a"}


class _Foreign:
    __module__ = "library"


def test_an_object_in_c_that_does_not_say_its_state_is_named_where_a_name_has_it() -> None:
    hidden = Hidden()
    assert hidden.doubt(_Foreign(), None) == "a _Foreign keeps its state in C, which cannot be compared"
    assert pickles_itself(type(iter([])))
    assert not pickles_itself(_Foreign)
