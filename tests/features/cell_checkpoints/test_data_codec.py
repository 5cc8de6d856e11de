"""Graphs of objects as data and back, and files that somebody wrote to do harm."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from features.cell_checkpoints.continued_cells import continued, executed, saved
from nbaccel.errors import CannotResume, CheckpointCorrupt
from nbaccel.features.cell_checkpoints.data_codec import Decoder, Encoder, refuse_state
from nbaccel.features.cell_checkpoints.head_state import HeadState

ABOVE = """
import torch
class Node:
    def __init__(self): self.left = self.right = None
class Slots:
    __slots__ = ("left", "right")
class Items(list): pass
"""


def _graph(data: st.DataObject, namespace: dict[str, Any]) -> list[Any]:
    """Return objects that hold each other at random: in cycles, and several times."""
    shared = [1, 2.5, "text", None, (1, "a"), torch.arange(4.0), np.arange(3), b"x", *namespace["above"]]
    made: list[Any] = [*shared]
    makers = (list, dict, deque, namespace["Node"], namespace["Slots"], namespace["Items"], OrderedDict, defaultdict)
    count = data.draw(st.integers(1, 12))
    new = [data.draw(st.sampled_from(makers))() for _ in range(count)]
    made += new
    some = st.sampled_from(range(len(made)))
    for each in new:
        inner = [made[data.draw(some)] for _ in range(data.draw(st.integers(0, 4)))]
        if isinstance(each, dict):
            each.update(enumerate(inner))
        elif isinstance(each, (list, deque)):
            each.extend(inner)
            each.append(tuple(inner))
        else:
            each.left, each.right = [*inner, None, None][:2]
    return new


def _same(one: Any, other: Any, pairs: dict[int, int]) -> bool:
    """Return whether two graphs are equal, with the same objects at the same places."""
    if id(one) in pairs:
        return pairs[id(one)] == id(other)
    if type(one).__name__ != type(other).__name__:
        return False
    if isinstance(one, (int, float, str, bytes, type(None))):
        return bool(one == other)
    pairs[id(one)] = id(other)
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return one.tolist() == other.tolist()
    parts = [
        list(each.items())
        if isinstance(each, dict)
        else list(each)
        if hasattr(each, "__iter__")
        else [each.left, each.right]
        for each in (one, other)
    ]
    flat = [[part for item in each for part in (item if isinstance(one, dict) else [item])] for each in parts]
    return len(flat[0]) == len(flat[1]) and all(_same(a, b, pairs) for a, b in zip(*flat, strict=True))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_graph_of_objects_comes_back_with_its_aliases_and_cycles(data: st.DataObject) -> None:
    there, here = (executed(ABOVE + "above = [[1], {'a': 2}]") for _ in range(2))
    head = HeadState(there)
    graph = _graph(data, there)
    encoder = Encoder(head, lambda name, tensor: tensor)
    encoded = json.loads(json.dumps(encoder.encoded(graph)))

    decoder = Decoder(json.loads(json.dumps(encoder.records)), encoder.tensors, HeadState(here))
    back = decoder.decoded(encoded)
    for fill in decoder.fills() * 2:
        fill()

    pairs = {id(there["above"][0]): id(here["above"][0]), id(there["above"][1]): id(here["above"][1])}
    assert _same(graph, back, pairs)


NOTEBOOK = """
import os, subprocess, torch
class Meter:
    count = 0
    def __init__(self): self.total, self.items = 0, []
class Guarded:
    def __del__(self): effects.append("deleted")
class Reduced:
    def __setstate__(self, state): effects.append(state)
    def __reduce__(self): return (effects.append, (1,))
def harm(*args): effects.append(args)
effects = []
history = []
meter = Meter()
weight = torch.zeros(2)
net = torch.nn.Linear(2, 1)
"""


def _hostile(folder: Path, **changed: Any) -> None:
    """Write the file of a harmless cell with other records in it."""
    saved(folder, "import torch\ntorch.manual_seed(0)\n" + NOTEBOOK, "history.append(1)\nweight += 1")
    path = folder / "difference.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changed))


def _changes(place: str, content: Any) -> dict[str, Any]:
    return {"changes": [[place, content]], "sums": {}, "written": {}}


METER, CLASS = "('meter', (('attributes', None),))", "('Meter', ())"


@pytest.mark.parametrize(
    "changed",
    [
        # names of Python's own, and of IPython, are never bound
        *({"names": {name: 1}} for name in ("__builtins__", "__class__", "In", "a.b", "1:__dict__", "x:y", "a b")),
        # attributes and keys with which Python itself does something
        *(_changes(METER, ["entries", [], [name], [1]]) for name in ("__class__", "__dict__", "__reduce__")),
        *(_changes(CLASS, ["t", [["d", [[name, 1]]], ["l", []]]]) for name in ("__init__", "__del__", "__getattr__")),
        {"names": {"x": ["o", 0]}, "records": [["object", CLASS, None, [["__class__", 1]]]]},
        {"names": {"x": ["o", 0]}, "records": [["dict", [["__reduce__", 1]]]]},
        # code of the notebook is named by no file: a function, a class, a module, a method
        *({"names": {"history": ["o", 0]}, "records": [["at", f"('{name}', ())"]]} for name in ("harm", "os", "Meter")),
        _changes(METER, ["entries", [], ["total"], [["o", 0]]]) | {"records": [["at", "('harm', ())"]]},
        # places that are not there, and steps that would lead further
        {"names": {"x": ["o", 0]}, "records": [["at", "('meter', (('below', '__class__'),))"]]},
        {"names": {"x": ["o", 0]}, "records": [["at", "__import__('os').system('true')"]]},
        # classes by another name than one of the notebook's own, and those that do something when they are made
        *(
            {"names": {"x": ["o", 0]}, "records": [["object", place, None, [["args", 1]]]]}
            for place in ("subprocess.Popen", "('subprocess', ())", "('Guarded', ())", "('Reduced', ())", "('net', ())")
        ),
        {"names": {"x": ["o", 0]}, "records": [["os.system", "true"]]},
        {"names": {"x": ["enum", CLASS, "__init__"]}},
        {"names": {"x": ["o", 0]}, "records": [["defaultdict", "eval", []]]},
        {"names": {"x": ["value", {"dict": [1, 2]}]}},
        {"names": {"x": ["value", {"dtype": ["torch.hub"]}]}},
        {"names": {"x": ["_value", 1]}},
        # a slot or a class that is none
        _changes("('meter', ())", ["t", [1, ["d", []], ["l", []]]]),
        _changes("('meter', ())", ["t", [None, ["d", [["total", 1]]], ["l", []]]]),
        _changes("('harm', ())", ["t", []]),
        _changes("('weight', ())", ["l", []]),
        # memory that is not in the file
        *(
            {
                "names": {"x": ["o", 0]},
                "records": [
                    ["tensor", "tensor.0", "torch.float32", size, stride, 0, "cpu", "Tensor", False, False, None]
                ],
            }
            for size, stride in (([1 << 40], [0]), ([1 << 20, 1 << 20], [1, 1]), ([2], [1 << 40]), ([-1], [1]))
        ),
        {"names": {"x": ["value", {"number": ["V1000000000000", 1 << 40]}]}},
        {"names": {"x": ["scalar", "V1000000000000", ""]}},
        {"names": {"x": ["o", 0]}, "records": [["array", "<U0", [1 << 40], "C", "tensor.0"]]},
        {"names": {"x": ["o", 0]}, "records": [["array", "O", [1], "C", "tensor.0"]]},
        {"names": {"x": ["o", 0]}, "records": [["objects", [1 << 40], []]]},
        {
            "names": {"x": ["o", 0]},
            "records": [
                ["numpy.random.RandomState", ["o", 1]],
                ["tuple", ["MT19937", ["o", 2], 1 << 40, 0, 0.0]],
                ["list", [0] * 624],
            ],
        },
        {"names": {"x": ["o", 0]}, "records": [["numpy.random.Generator", "__loader__", None]]},
        # records without an end
        {"names": {"x": ["o", 0]}, "records": [["tuple", [["o", 0]]]]},
        {"names": {"x": ["o", 5]}},
        {"names": {"x": ["o", -1]}},
        {"names": {"x": ["o", True]}},
        *({"names": {"x": value}} for value in ([], {}, ["o"], ["int", "x"], ["range"], ["Path", 1, 2])),
        *({key: None} for key in ("names", "changes", "deleted", "unsaved", "sums", "written")),
    ],
)
def test_a_file_that_somebody_wrote_can_only_fail(tmp_path: Path, changed: dict[str, Any]) -> None:
    _hostile(tmp_path, **changed)
    seen: list[dict[str, Any]] = []

    with pytest.raises((CheckpointCorrupt, CannotResume)):
        seen.append(continued(tmp_path, "import torch\ntorch.manual_seed(0)\n" + NOTEBOOK)[0])

    assert not seen


def test_a_hostile_file_that_fails_has_changed_nothing(tmp_path: Path) -> None:
    from nbaccel.features.cell_checkpoints.difference import StoredDifference

    above = "import torch\ntorch.manual_seed(0)\n" + NOTEBOOK
    _hostile(tmp_path, names={"x": ["o", 0]}, records=[["at", "('harm', ())"]])
    notebook = executed(above)

    with pytest.raises(CheckpointCorrupt, match="does not fit this notebook, or is damaged"):
        StoredDifference.read(tmp_path).apply(HeadState(notebook), lambda *_: None)

    assert (notebook["history"], notebook["weight"].tolist(), notebook["effects"]) == ([], [0, 0], [])


@pytest.mark.parametrize("state", [{"buffer_pos": -1}, {"buffer_pos": 5}, {"state": {"pos": 625}}])
def test_states_that_numpy_would_read_beyond_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it is not the state of a random generator"):
        refuse_state(state)


def test_states_of_numpys_generators_are_taken() -> None:
    for kind in (np.random.MT19937, np.random.Philox, np.random.PCG64, np.random.SFC64):
        refuse_state(kind(1).state)
    refuse_state(np.random.RandomState(1).get_state())


def test_no_text_of_a_file_is_imported_or_evaluated() -> None:
    """The two calls by which a file's text could become code do not stand in these modules."""
    folder = Path(__file__).parents[3] / "nbaccel/features/cell_checkpoints"
    for name in ("data_codec.py", "difference.py", "head_state.py"):
        source = (folder / name).read_text()
        assert not any(word in source for word in ("import_module", " eval(", "exec(", "pickle", "__import__"))
