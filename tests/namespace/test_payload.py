"""Payloads: what travels arrives whole, shared where it was shared, and private to the receiver."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

from nbaccel import Accelerator
from nbaccel.errors import CannotSend
from nbaccel.namespace.nbytes import size_of
from nbaccel.namespace.payload import Payload, pack, pack_what_can_travel, unpack, unpack_what_can_be_rebuilt
from nbaccel.namespace.pickling import Packer


def travel(values: dict[str, Any], **there: Any) -> dict[str, Any]:
    """`values` as they come out on the other side; `there` as `pack` and `unpack_what_can_be_rebuilt` take them."""
    here = {name: there.pop(name) for name in ("by_reference",) if name in there}
    payload = pack(values, namespace=there.pop("packed_namespace", None), **here)
    try:
        if not there:
            return unpack(payload.fd)
        came, refused = unpack_what_can_be_rebuilt(payload.fd, **there)
        assert refused == {}
        return came
    finally:
        os.close(payload.fd)


def test_plain_values_travel_without_a_search_for_what_they_lead_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks mostly return a loss or nothing, and would copy pages to find that it has no parts."""

    def refuse(packer: Packer, obj: Any) -> Any:
        raise AssertionError(f"{obj!r} was looked at")

    plain = {"nothing": None, "loss": 0.5, "steps": 3, "is_best": True, "name": "a", "bytes": b"b"}
    monkeypatch.setattr(Packer, "reducer_override", refuse)
    assert travel(plain) == plain


def in_child(answer: Callable[[], Any]) -> Any:
    """What `answer` returns in a forked process; JSON only."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
            os.write(writable, json.dumps(answer()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writable)
    with open(readable, "rb") as file:
        text = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(text)


def notebook(source: str) -> dict[str, Any]:
    """A namespace like a notebook's, after a cell with `source`."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace


# What is shared stays shared ----------------------------------------------------------------------------------------


class _Remade(torch.nn.Linear):
    """A model that is pickled in its own way."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Remade, ()


class _OfNoModule:
    pass


_OfNoModule.__module__ = None  # type: ignore[assignment]


def test_as_written_leaves_objects_alone_that_are_pickled_in_their_own_way() -> None:
    dressed = Accelerator("bf16", cpu=True).prepare(_Remade())
    payload, refused = pack_what_can_travel({"models": [dressed], "odd": [_OfNoModule()]}, as_written=True)
    assert refused == {}
    (model,) = unpack(payload.fd)["models"]
    assert type(model) is _Remade
    assert "forward" not in vars(model)
    os.close(payload.fd)


class _OfOurs:
    """A hook of ours, which knows what cannot be sent."""

    def __init__(self) -> None:
        self.knows = threading.Lock()

    def __call__(self, *_: Any) -> None:
        pass


_OfOurs.__module__ = "nbaccel.train"


def _handles() -> list[Any]:
    """Handles of the user's hooks, in tables in which there is one of ours: of the process and of a tensor."""
    weight, ours = torch.nn.Parameter(torch.ones(2)), _OfOurs()
    return [
        *map(register_optimizer_step_pre_hook, (ours, print)),
        *map(weight.register_post_accumulate_grad_hook, (ours, print)),
    ]


def test_the_handle_of_a_hook_brings_none_of_our_hooks_along() -> None:
    handles, layer = _handles(), torch.nn.Linear(1, 1)
    own = layer.register_forward_hook(print)
    payload, refused = pack_what_can_travel({"all": handles, "own": own, "layer": layer}, as_written=True)
    assert refused == {}
    came = unpack(payload.fd)
    for handle in came["all"]:
        handle.remove()
    assert len(came["layer"]._forward_hooks) == 1
    came["own"].remove()
    assert not came["layer"]._forward_hooks
    assert layer._forward_hooks
    os.close(payload.fd)
    for handle in handles:
        handle.remove()


def test_names_of_one_object_are_one_object_again() -> None:
    shared = [1, 2]
    there = travel({"a": shared, "b": {"inner": shared}})
    assert there == {"a": [1, 2], "b": {"inner": [1, 2]}}
    assert there["a"] is there["b"]["inner"]


def test_views_of_one_tensor_stay_views() -> None:
    x = torch.arange(100_000.0).reshape(100, 1000)
    there = travel({"x": x, "first": x[:2], "transposed": x.t(), "strided": x[::3, 5:]})
    there["x"][0, 6] = -1
    assert there["first"][0, 6] == there["transposed"][6, 0] == there["strided"][0, 1] == -1
    assert there["strided"].stride() == x[::3, 5:].stride()
    assert there["strided"].storage_offset() == 5


def test_tied_weights_and_an_optimizers_parameters_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(4, 4)
    there = travel({"optimizer": optimizer, "model": model, "flat": model[0].weight.detach().view(-1)})
    weight = there["model"][0].weight
    assert there["model"][1].weight is weight
    assert there["optimizer"].param_groups[0]["params"][0] is weight
    assert there["optimizer"].state[weight]["momentum_buffer"].sum() == 16
    with torch.no_grad():
        weight.zero_()
    assert there["flat"].abs().sum() == 0


def test_views_of_one_array_stay_views() -> None:
    a = np.arange(100_000.0).reshape(100, 1000)
    there = travel({"strided": a[::2, 10:], "a": a, "reversed": a[::-1], "row": a[0], "flat": a.reshape(-1)})
    there["flat"][10] = -1
    assert there["a"][0, 10] == there["strided"][0, 0] == there["reversed"][99, 10] == there["row"][10] == -1
    np.testing.assert_array_equal(there["reversed"][:99], a[::-1][:99])


def test_an_array_and_the_tensor_made_from_it_share_memory() -> None:
    a = np.arange(50_000)
    there = travel({"a": a, "t": torch.from_numpy(a)})
    there["t"][7] = -1
    assert there["a"][7] == -1


# Tensors and arrays arrive as they were ------------------------------------------------------------------------------

TENSORS = {
    "float": torch.randn(3, 4),
    "big": torch.arange(100_000),
    "bfloat16": torch.ones(5, dtype=torch.bfloat16),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "expanded": torch.ones(1, 3).expand(5, 3),
    "not contiguous": torch.randn(4, 6)[:, ::2],
    "sparse": torch.eye(3).to_sparse(),
    "leaf": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "frozen parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    there = travel({"x": tensor})["x"]
    assert type(there) is type(tensor)
    assert (there.dtype, there.size(), there.layout) == (tensor.dtype, tensor.size(), tensor.layout)
    assert there.requires_grad == tensor.requires_grad
    assert torch.equal(there.to_dense().to(torch.complex64), tensor.to_dense().to(torch.complex64))
    if tensor.layout is torch.strided:
        assert there.stride() == tensor.stride()


def test_a_meta_tensor_stays_on_meta() -> None:
    there = travel({"x": torch.empty(5, device="meta")})["x"]
    assert there.device.type == "meta"
    assert there.shape == (5,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_views_of_a_device_tensor_arrive_as_views_on_the_device_that_is_in_use() -> None:
    x = torch.arange(10.0, device="cuda")
    there = travel({"x": x, "half": x[5:]})
    assert there["x"].device == x.device
    there["x"][5] = -1
    assert there["half"][0] == -1
    assert x[5] == 5


def test_attributes_of_a_tensor_travel_with_it() -> None:
    x = torch.ones(2)
    x.note = "kept"  # type: ignore[attr-defined]
    assert travel({"x": x})["x"].note == "kept"


ARRAYS = {
    "big": np.arange(100_000),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "dates": np.array(["2020-01-01", "2020-01-02"], dtype="M8[D]"),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([1, "a", None], dtype=object),
    "strings": np.array(["a", "bc"]),
    "scalar": np.array(5),
    "empty": np.empty((0, 3)),
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_an_array_arrives_as_it_was(array: np.ndarray) -> None:
    there = travel({"x": array})["x"]
    np.testing.assert_array_equal(there, array)
    assert (there.dtype, there.flags.writeable) == (array.dtype, array.flags.writeable)
    assert there.flags.f_contiguous == array.flags.f_contiguous


def test_a_memory_map_travels_as_the_name_of_its_file(tmp_path: Path) -> None:
    here = np.memmap(tmp_path / "tokens.bin", dtype="u2", mode="w+", shape=(100_000,))
    here[5] = 7
    payload = pack({"tokens": here})
    there = unpack(payload.fd)["tokens"]
    os.close(payload.fd)
    assert payload.nbytes < 10_000
    assert size_of(here) == 0
    here[6] = 8
    assert list(there[5:7]) == [7, 8]


@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    )
)
@settings(max_examples=30, deadline=None)
def test_plain_values_come_back_equal(value: Any) -> None:
    assert travel({"value": value}) == {"value": value}


def test_big_bytes_and_out_of_band_buffers_arrive() -> None:
    class Image:
        def __init__(self, pixels: bytearray) -> None:
            self.pixels = pixels

        def __reduce_ex__(self, protocol: Any) -> Any:
            import pickle

            return Image, (pickle.PickleBuffer(self.pixels),)

    there = travel({"image": Image(bytearray(b"p" * 200_000)), "text": b"t" * 200_000, "buffer": bytearray(200_000)})
    assert bytes(there["image"].pixels) == b"p" * 200_000
    assert there["text"] == b"t" * 200_000
    assert isinstance(there["buffer"], bytearray)


# Another process ----------------------------------------------------------------------------------------------------


def test_ranks_read_the_same_payload_and_do_not_see_each_others_writes() -> None:
    payload = pack({"a": np.ones(1_000_000), "t": torch.ones(1_000_000), "f": lambda x: x + 1})

    def rank() -> Any:
        there = unpack(payload.fd)
        seen = float(there["a"].sum()), there["t"][-1].item(), there["f"](1)
        there["a"][:] = 5
        there["t"].zero_()
        return *seen, float(there["a"][0])

    assert in_child(rank) == [1_000_000, 1, 2, 5]
    assert in_child(rank) == [1_000_000, 1, 2, 5]
    os.close(payload.fd)


def test_a_value_outlives_the_file_descriptor_and_its_siblings() -> None:
    payload = pack({"a": np.ones(1_000_000), "b": np.zeros(1_000_000)})
    a = unpack(payload.fd)["a"]
    os.close(payload.fd)
    a[0] = 2
    assert a.sum() == 1_000_001


def test_a_small_value_does_not_keep_the_memory_of_the_big_ones() -> None:
    def rank() -> Any:
        there = travel({"small": np.ones(10), "big": np.ones(1_000_000), "bias": torch.ones(3)})
        del there["big"]
        return [there["small"].sum(), "nbaccel-payload" in Path("/proc/self/maps").read_text()]

    assert in_child(rank) == [10, False]


@pytest.mark.slow
def test_packing_a_big_array_takes_no_second_copy() -> None:
    def rank() -> Any:
        array = np.ones(25_000_000)  # 200 MB
        Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
        before = peak_kib()
        payload = pack({"a": array, "view": array[10:]})
        return [payload.nbytes, peak_kib() - before]

    nbytes, grown_kib = in_child(rank)
    assert 200e6 < nbytes < 201e6
    assert grown_kib < 20_000


def peak_kib() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def test_a_process_without_torch_packs_without_importing_it() -> None:
    program = (
        "import sys; from nbaccel.namespace.nbytes import size_of\n"
        "from nbaccel.namespace.payload import pack, unpack\n"
        "assert unpack(pack({'x': [1]}).fd) == {'x': [1]}; size_of([1])\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_something_else_than_a_payload_is_refused() -> None:
    fd = os.memfd_create("other")
    os.write(fd, b"x" * mmap.PAGESIZE)
    with pytest.raises(ValueError, match="this file descriptor does not hold a payload"):
        unpack(fd)
    os.close(fd)


# Code of the notebook -----------------------------------------------------------------------------------------------


def test_a_function_lives_in_the_namespace_over_there_and_sees_later_names() -> None:
    here = notebook("scale = 2\ndef f(x): return x * scale + later\nlater = 0")
    rank_namespace: dict[str, Any] = {"__name__": "__main__"}
    there = travel({"f": here["f"]}, packed_namespace=here, namespace=rank_namespace)
    assert there["f"].__globals__ is rank_namespace
    assert there["f"](3) == 6
    rank_namespace["later"] = 100
    assert there["f"](3) == 106


def test_functions_of_the_notebook_keep_the_name_of_their_cell() -> None:
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(
        compile(
            "def outer():\n    def inner(): pass\n    return inner\nclass C:\n    def f(self): pass", "cell 7", "exec"
        ),
        here,
    )
    there = travel({"outer": here["outer"], "C": here["C"]}, packed_namespace=here, namespace={"__name__": "__main__"})
    for function in (there["outer"], there["outer"](), there["C"].f):
        assert function.__code__.co_filename == "cell 7"


def test_names_that_the_other_namespace_has_are_left_alone() -> None:
    rank = notebook("data = 'of the rank'\ndef f(): return data")
    kernel = notebook("data = 'of the kernel'")
    builtins = kernel["__builtins__"]
    there = travel({"f": rank["f"]}, packed_namespace=rank, namespace=kernel)
    assert there["f"]() == "of the kernel"
    assert kernel["__builtins__"] is builtins
    assert kernel.keys() == {"__name__", "__builtins__", "data"}


def test_a_class_can_use_its_globals_while_it_is_unpacked() -> None:
    here = notebook(
        "import threading\n"
        "class Counter:\n"
        "    def __init__(self): self.lock, self.n = threading.Lock(), 3\n"
        "    def __getstate__(self): return self.n\n"
        "    def __setstate__(self, n): self.lock, self.n = threading.Lock(), n\n"
        "counter = Counter()"
    )
    there = travel({"counter": here["counter"]}, packed_namespace=here, namespace={"__name__": "__main__"})
    assert there["counter"].n == 3


def test_closures_recursion_dataclasses_and_modules_of_the_notebook_travel_by_value() -> None:
    here = notebook(
        "import dataclasses, torch\n"
        "def adder(n): return lambda x: x + n\n"
        "add5 = adder(5)\n"
        "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n    y: int = 1\n"
        "point = Point(3)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.layer = torch.nn.Linear(2, 2); self.act = lambda x: x * 0 + 1\n"
        "    def forward(self, x): return self.act(self.layer(x))\n"
        "net = Net()"
    )
    names = ("add5", "fib", "Point", "point", "Net", "net")
    there = travel({name: here[name] for name in names}, packed_namespace=here, namespace={"__name__": "__main__"})
    assert (there["add5"](1), there["fib"](10)) == (6, 55)
    assert isinstance(there["point"], there["Point"])
    assert there["point"] == there["Point"](3)
    assert type(there["net"]) is there["Net"]
    assert there["net"](torch.zeros(1, 2)).sum() == 2


def test_a_class_with_a_cached_property_travels() -> None:
    here = notebook("import functools\nclass A:\n    @functools.cached_property\n    def x(self): return [1]\na = A()")
    there = travel({"a": here["a"]}, packed_namespace=here)
    assert there["a"].x == [1]
    assert there["a"].x is there["a"].x


def test_schedulers_loaders_and_generators_of_a_training_travel() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    values = {
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        "optimizer": optimizer,
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(5, 2)), batch_size=2),
        "scaler": torch.amp.GradScaler("cpu"),
        "torch_generator": torch.Generator().manual_seed(3),
        "numpy_generator": np.random.default_rng(3),
    }
    expected = torch.rand(1, generator=torch.Generator().manual_seed(3)), np.random.default_rng(3).random()
    there = travel(values)
    assert there["scheduler"].optimizer is there["optimizer"]
    assert [len(batch[0]) for batch in there["loader"]] == [2, 2, 1]
    assert (torch.rand(1, generator=there["torch_generator"]), there["numpy_generator"].random()) == expected


def test_an_anchored_class_comes_back_as_the_same_class() -> None:
    here = notebook("class Net: pass\nnet = Net()\ndef f(): pass")
    by_reference = {id(here["Net"]): "Net", id(here["f"]): "f"}
    there = travel({"net": here["net"], "f": here["f"]}, by_reference=by_reference, anchored=here.__getitem__)
    assert type(there["net"]) is here["Net"]
    assert there["f"] is here["f"]


def test_an_anchor_without_a_way_to_find_it_is_an_error() -> None:
    here = notebook("class Net: pass")
    with pytest.raises(ValueError, match="refers to 'Net' of this process"):
        travel({"Net": here["Net"]}, by_reference={id(here["Net"]): "Net"})


def test_a_tensor_that_refers_to_itself_weakly_does_so_there() -> None:
    """As each of Pyro's parameters does."""
    loc = torch.nn.Parameter(torch.ones(2))
    loc.unconstrained, loc.note = weakref.ref(loc), "kept"  # type: ignore[attr-defined]
    there = travel({"guide": [loc]})["guide"][0]
    assert there.unconstrained() is there
    assert (there.note, there.tolist(), there.requires_grad) == ("kept", [1.0, 1.0], True)
    assert loc.unconstrained() is loc  # type: ignore[attr-defined]


def test_standard_streams_become_those_of_the_other_process() -> None:
    assert travel({"out": sys.stdout})["out"] is sys.stdout


# What cannot travel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (threading.Lock(), "a lock cannot be sent to another process"),
        ((x for x in ()), "a generator cannot be sent to another process"),
        (threading.Thread(), "a thread cannot be sent to another process"),
        ({"deep": [threading.RLock()]}, "a lock cannot be sent to another process"),
        (torch.ones(2, requires_grad=True) * 2, "part of an autograd graph; send x.detach()"),
        (tqdm(disable=True), "a progress bar cannot be sent to another process"),
        (sys._getframe(), "a frame of a running function cannot be sent to another process"),
    ],
    ids=["lock", "generator", "thread", "inside", "graph", "bar", "frame"],
)
def test_the_reason_of_a_refusal_is_a_sentence(value: Any, reason: str) -> None:
    with pytest.raises(CannotSend) as caught:
        pack({"fine": 1, "culprit": value})
    assert caught.value.names == {"culprit": reason}
    assert str(caught.value).startswith("1 of 2 names cannot be sent to another process:\n  culprit: " + reason)
    assert "Make such objects in the cell that uses them" in str(caught.value)


def test_files_and_sockets_are_refused_and_the_rest_travels(tmp_path: Path) -> None:
    shared = np.ones(3)
    with (tmp_path / "log").open("w+") as text, (tmp_path / "raw").open("wb") as raw, socket.socket() as connection:
        pipe, end = multiprocessing.Pipe()
        values = {"text": text, "a": shared, "raw": raw, "connection": connection, "pipe": pipe, "b": shared}
        payload, refused = pack_what_can_travel(values)
        pipe.close()
        end.close()
    there = unpack(payload.fd)
    os.close(payload.fd)
    assert refused == {
        "text": "an open file cannot be sent to another process",
        "raw": "an open file cannot be sent to another process",
        "connection": "a socket cannot be sent to another process",
        "pipe": "a pipe cannot be sent to another process",
    }
    assert there.keys() == {"a", "b"}
    assert there["a"] is there["b"]


def test_a_function_that_uses_an_open_file_is_refused_by_both_names(tmp_path: Path) -> None:
    here = notebook("def log(text): stream.write(text)")
    with (tmp_path / "log").open("w") as here["stream"], pytest.raises(CannotSend) as caught:
        pack({"log": here["log"]}, namespace=here)
    assert caught.value.names == {"log": "it uses stream: an open file cannot be sent to another process"}


def test_an_object_whose_own_pickling_fails_is_named_with_its_error() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise RuntimeError("not today\nand not tomorrow")

    with pytest.raises(CannotSend) as caught:
        pack({"x": Stubborn()})
    assert caught.value.names == {"x": "RuntimeError: not today"}


def test_a_type_that_pickle_does_not_know_is_named() -> None:
    with pytest.raises(CannotSend) as caught:
        pack({"x": mmap.mmap(-1, 10)})
    assert caught.value.names == {"x": "an object of type mmap.mmap cannot be sent to another process"}


def test_too_deep_a_structure_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(500_000):  # Python 3.14 gets as deep as the thread's stack reaches
        nested = [nested]
    with pytest.raises(CannotSend) as caught:
        pack({"nested": nested})
    while nested:  # freed from the outside: the collector must not recurse either
        nested = nested.pop()
    assert caught.value.names == {"nested": "it is nested too deeply to be sent to another process"}


def test_a_refused_payload_leaves_no_file_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CannotSend):
        pack({"lock": threading.Lock(), "big": np.ones(100_000)})
    assert os.listdir("/proc/self/fd") == before


def test_nothing_is_a_payload_too() -> None:
    assert travel({}) == {}
    payload, refused = pack_what_can_travel({"lock": threading.Lock()})
    os.close(payload.fd)
    assert isinstance(payload, Payload)
    assert list(refused) == ["lock"]


# Weight -------------------------------------------------------------------------------------------------------------


def test_size_counts_memory_once_and_whole() -> None:
    x, a = torch.zeros(1000, 1000), np.zeros(1_000_000)
    assert 4e6 <= size_of({"x": x, "row": x[0]}) < 4.01e6
    assert 8e6 <= size_of([a, a[:5], a.reshape(10, -1)]) < 8.01e6
    assert 4e6 <= size_of(torch.utils.data.TensorDataset(x)) < 4.01e6


def test_size_of_a_module_is_that_of_its_parameters_and_of_a_class_nothing() -> None:
    assert 4e6 <= size_of(torch.nn.Linear(1000, 1000)) < 4.1e6
    assert size_of([int, os, len]) < 100


def test_size_of_a_long_list_is_estimated_from_a_sample() -> None:
    rows = [[f"{i:09}", i] for i in range(100_000)]
    assert 5e6 < size_of(rows) < 20e6
    assert size_of(lambda: rows) == pytest.approx(size_of(rows), rel=0.01)


def test_size_of_bytes_and_object_arrays() -> None:
    assert 1e6 <= size_of(b"x" * 1_000_000) < 1.001e6
    assert size_of(np.array([b"x" * 1000, b"y" * 1000], dtype=object)) >= 2000


def test_modules_of_odd_classes_travel_by_name() -> None:
    import torch

    there = travel({"cudnn": torch.backends.cudnn, "backends": torch.backends})
    assert there["cudnn"] is torch.backends.cudnn
    assert there["backends"] is torch.backends


def test_a_function_may_mention_the_backends_of_torch() -> None:
    import torch

    def train() -> bool:
        return bool(torch.backends.cudnn.benchmark)

    assert travel({"train": train})["train"]() is torch.backends.cudnn.benchmark


def test_packages_are_imported_over_there_in_the_order_of_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that patches another is often asked to be imported first; the pickle refers to the other first."""
    (tmp_path / "patched_one.py").write_text("import builtins\nwas_patched = hasattr(builtins, '_patches')\n")
    (tmp_path / "patches_it.py").write_text("import builtins\nbuiltins._patches = True\nclass Fast: pass\n")
    program = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch, patches_it, patched_one\n"
        "from nbaccel.namespace.payload import pack\n"
        "payload = pack({'a': patched_one, 'b': patches_it.Fast()})\n"
        "os.lseek(payload.fd, 0, 0)\n"
        "sys.stdout.buffer.write(os.read(payload.fd, payload.nbytes))\n"
    )
    packed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    fd = os.memfd_create("payload")
    os.write(fd, packed)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert in_child(lambda: unpack(fd)["a"].was_patched) is True
    finally:
        os.close(fd)


def test_an_optimizer_of_a_scheduler_counts_its_steps_over_there_too() -> None:
    """Else torch says at the scheduler's first step that the order of the two is wrong."""
    import torch

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    there = travel({"scheduler": scheduler, "optimizer": optimizer, "weight": weight})
    assert there["scheduler"].optimizer is there["optimizer"]
    there["weight"].grad = torch.ones(1)
    there["optimizer"].step()
    there["scheduler"].step()  # warnings are errors
    assert (there["weight"].item(), there["scheduler"].get_last_lr()) == (0.5, [0.05])
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        travel({"scheduler": scheduler})["scheduler"].step()
