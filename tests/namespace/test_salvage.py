"""One value that cannot be packed, or not be rebuilt, does not take the others along."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
import weakref
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch

from nbaccel.errors import CannotSend
from nbaccel.namespace.payload import pack, pack_what_can_travel, unpack, unpack_what_can_be_rebuilt


def arrives(values: dict[str, Any], **there: Any) -> tuple[dict[str, Any], dict[str, str]]:
    payload = pack(values, namespace=there.pop("packed_namespace", None))
    try:
        return unpack_what_can_be_rebuilt(payload.fd, **there)
    finally:
        os.close(payload.fd)


class Sad(Exception):
    """An exception as many are: its class wants other arguments than it passes on."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(f"rank {rank}, step {step}")


class Stateful:
    def __init__(self) -> None:
        self.held = [1]

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no state here")


class Picky(UserList[int]):
    def __reduce__(self) -> Any:
        return Picky, (), None, iter([1, 2])

    def extend(self, other: Any) -> None:
        raise RuntimeError("full")

    append = extend


def from_a_module_that_is_not_there() -> Any:
    module = types.ModuleType("gone_elsewhere")
    exec("class Gone:\n    pass", vars(module))
    sys.modules["gone_elsewhere"] = module
    return module.Gone()


@pytest.fixture(autouse=True)
def forgotten_module() -> Any:
    yield
    sys.modules.pop("gone_elsewhere", None)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Sad(1, 2), "TypeError: .*missing 1 required positional argument: 'step'"),
        (Stateful, "RuntimeError: no state here"),
        (Picky, "RuntimeError: full"),
        (lambda: np.array([1, Stateful()], dtype=object), "RuntimeError: no state here"),
        (lambda: {"a": [(Stateful(),)]}, "RuntimeError: no state here"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(1, 1), StatefulModule()), "RuntimeError: no state here"),
        (from_a_module_that_is_not_there, "ModuleNotFoundError: No module named 'gone_elsewhere'"),
    ],
)
def test_what_cannot_be_rebuilt_is_named_and_the_rest_arrives(make: Any, reason: str) -> None:
    model = torch.nn.Linear(2, 2)
    values = {"first": [model, 1], "sad": make(), "model": model, "array": np.arange(3), "text": "x"}
    payload = pack(values)
    sys.modules.pop("gone_elsewhere", None)
    there, refused = unpack_what_can_be_rebuilt(payload.fd)
    os.close(payload.fd)
    assert there.keys() == values.keys() - refused.keys()
    assert refused.keys() == {"sad"}
    assert re.fullmatch(f"it cannot be rebuilt here: {reason}", refused["sad"]), refused["sad"]
    assert torch.equal(there["model"].weight, model.weight)
    assert there["first"][0] is there["model"], "what was shared is shared"
    assert there["array"].tolist() == [0, 1, 2]


class StatefulModule(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no state here")


def test_every_name_that_leads_to_what_cannot_be_rebuilt_is_left_out() -> None:
    sad = Stateful()
    there, refused = arrives({"sad": sad, "beside": [1], "holder": {"inner": [sad]}, "function": lambda: 1})
    assert refused.keys() == {"sad", "holder"}
    assert there["beside"] == [1]
    assert there["function"]() == 1


def test_functions_of_the_notebook_are_rebuilt_beside_what_cannot_be() -> None:
    here: dict[str, Any] = {"__name__": "__main__", "sad": Stateful()}
    exec("k = 3\ndef times(x):\n    return k * x\ndef uses():\n    return sad", here)
    space: dict[str, Any] = {"__name__": "__main__"}
    names = {name: here[name] for name in ("times", "sad")}
    there, refused = arrives(names, packed_namespace=here, namespace=space)
    assert refused.keys() == {"sad"}
    assert there["times"](2) == 6


def test_unpack_alone_still_raises_what_the_class_does() -> None:
    payload = pack({"sad": Sad(1, 2)})
    with pytest.raises(TypeError):
        unpack(payload.fd)
    os.close(payload.fd)


class Moody:
    """Can be packed every second time."""

    asked = 0

    def __reduce__(self) -> Any:
        Moody.asked += 1
        if Moody.asked % 2:
            raise RuntimeError("not now")
        return list, ()


def test_an_object_that_answers_now_so_and_now_so_is_refused_at_last() -> None:
    Moody.asked = 0
    payload, refused = pack_what_can_travel({"moody": [Moody()], "x": 1})
    assert "moody" in refused
    assert unpack(payload.fd).get("x", 1) == 1
    os.close(payload.fd)


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class RefusesWithoutWords:
    def __getstate__(self) -> Any:
        raise Wordless


def test_an_error_without_words_is_named_by_its_class() -> None:
    with pytest.raises(CannotSend) as caught:
        pack({"x": RefusesWithoutWords()})
    assert caught.value.names == {"x": "Wordless"}


class Interrupted:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_packing_and_says_where_it_was() -> None:
    with pytest.raises(KeyboardInterrupt, match="interrupted while slow was packed for another process"):
        pack_what_can_travel({"in:x": 1, "in:slow": [Interrupted()], "in:y": 2})


class DeceivingProxy:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("outside of a context")

    def __reduce__(self) -> Any:
        return list, ()


def test_proxies_are_not_asked_for_the_class_they_stand_for() -> None:
    payload, refused = pack_what_can_travel({"proxy": [DeceivingProxy()]}, as_written=True)
    assert refused.keys() <= {"proxy"}
    os.close(payload.fd)


def test_a_name_for_a_weak_proxy_is_refused() -> None:
    behind = Stateful()
    payload, refused = pack_what_can_travel({"proxy": weakref.proxy(behind), "x": 1})
    os.close(payload.fd)
    assert refused == {"proxy": "a weak reference cannot be sent to another process; send the object itself"}


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[made]", "Node(made)"])
def test_a_long_chain_does_not_end_the_process_whatever_recursion_limit_is_set(link: str) -> None:
    program = (
        "import os, sys\n"
        "from nbaccel.namespace.payload import pack_what_can_travel\n"
        "class Node:\n    def __init__(self, next): self.next = next\n"
        "sys.setrecursionlimit(10**7); made = None\n"
        f"for _ in range(200_000): made = {link}\n"
        "payload, refused = pack_what_can_travel({'made': made, 'x': 1})\n"
        "print(refused, sys.getrecursionlimit(), flush=True); os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "{'made': 'it is nested too deeply to be sent to another process'} 10000000\n"
