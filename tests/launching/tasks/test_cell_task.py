"""Cells as the work of a rank, without a rank: what goes back for the names of `--out`."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from typing import Any

import pytest
import torch

from nbaccel.launching.tasks import cell_task
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.namespace.payload import unpack_what_can_be_rebuilt
from nbaccel.namespace.wrappers import plain


class Bunch(dict[str, Any]):
    """The idiom as people write it: a name that is missing is a KeyError, not an AttributeError."""

    __getattr__ = dict.__getitem__


def test_an_object_whose_attributes_are_keys_goes_back() -> None:
    task = CellTask(CellSource("settings['rate'] = 2\nsettings", "Cell In[1]"), {"settings": Bunch()}, ("settings",))
    task.run()
    results = task.results(0)
    assert results.values["settings"] == {"rate": 2}


def test_an_object_that_looks_up_every_attribute_in_a_dict_goes_back() -> None:
    class Settings:
        def __init__(self) -> None:
            self.values = {"rate": 2}

        def __getattr__(self, name: str) -> Any:
            return self.__dict__["values"][name]

    task = CellTask(CellSource("done = 1", "Cell In[1]"), {"settings": Settings()}, ("settings",))
    task.run()
    assert task.results(0).values["settings"].rate == 2


def test_an_error_after_an_await_has_no_other_behind_it() -> None:
    task = CellTask(CellSource("import asyncio\nawait asyncio.sleep(1 / 0)", "Cell In[1]"), {})
    with pytest.raises(ZeroDivisionError) as caught:
        task.run()
    assert caught.value.__context__ is None


def test_a_model_is_taken_out_of_a_subclass_of_torchs_wrapper() -> None:
    class Own(torch.nn.DataParallel[torch.nn.Linear]):
        pass

    model = torch.nn.Linear(2, 1)
    assert plain(Own(model)) is model


def test_a_cells_code_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def counted(name: str) -> None:
        real = getattr(cell_task, name)

        def apart(*given: Any) -> Any:
            taken.append(name)
            return real(*given)

        monkeypatch.setattr(cell_task, name, apart)

    functions = ["names_read", "names_assigned", "names_in_magics", "loop_variables", "made_before_read"]
    for name in functions:
        counted(name)
    task = CellTask(CellSource("for each in data:\n    total += each", "Cell In[1]"), {"data": [1, 2], "total": 0})
    for _ in range(3):  # the plan, what is short, and the files behind names
        assert set(task.values_to_send()) == {"data", "total"}
    task.begin(0)
    task.run()
    assert task.results(0).values["total"] == 3
    assert task.left_behind()[1]["total"] == 3
    assert sorted(taken) == sorted(functions)


def sent(code: str, out: tuple[str, ...] = (), **names: Any) -> dict[str, Any]:
    """What a rank that is no copy of the notebook gets for a cell."""
    task = CellTask(CellSource(code, "Cell In[1]"), names, out)
    payload = task.pack()
    try:
        values, refused = unpack_what_can_be_rebuilt(payload.fd, namespace={})
    finally:
        os.close(payload.fd)
    assert refused == {}
    return {name.removeprefix("in:"): value for name, value in values.items() if name != "head"}


def test_a_name_that_the_cell_deletes_before_it_reads_it_is_there_without_its_value() -> None:
    model = torch.nn.Linear(2, 1)
    assert sent("del model", model=model) == {"model": None}
    assert sent("if True:\n    del model\nmodel = 1\nprint(model)", model=model) == {"model": None}
    assert isinstance(sent("print(model)\ndel model", model=model)["model"], torch.nn.Linear)
    assert isinstance(sent("if rare:\n    del model", ("model",), model=model, rare=0)["model"], torch.nn.Linear)


def test_a_function_brings_no_model_along_that_the_cell_makes_anew() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "model": torch.nn.Linear(500, 500)}
    exec("def use():\n    return model", namespace)
    namespace["use"].__module__ = "__main__"
    sizes = {}
    for code in ("use()", "model = 1\nuse()", "use()\nmodel = 1"):
        payload = CellTask(CellSource(code, "Cell In[1]"), namespace).pack()
        os.close(payload.fd)
        sizes[code] = payload.nbytes > 1_000_000
    assert sizes == {"use()": True, "model = 1\nuse()": False, "use()\nmodel = 1": True}


def left(code: str, *out: str, **names: Any) -> dict[str, Any]:
    """What a cell leaves of the names in `--out`, also if it ends by an error."""
    task = CellTask(CellSource(code, "Cell In[1]"), {"__name__": "__main__", **names}, out)
    with suppress(ZeroDivisionError):
        task.run()
    results = task.results(0)
    assert set(results.missing) == set(out) - results.values.keys()
    return dict(results.values)


def test_a_cell_that_ends_early_does_not_leave_what_the_notebook_had() -> None:
    assert left("1 / 0\nscore = 2", "score", score=1) == {}
    assert left("score = 1\n1 / 0", "score", score=1) == {"score": 1}
    assert left("for at in range(3):\n    best_epoch = at", "best_epoch", best_epoch=2) == {"best_epoch": 2}
    assert left("best = max(best, 2)", "best", best=3) == {"best": 3}, "it has read and kept it"
    assert left("1 / 0\nbest = max(best, 2)", "best", best=3) == {}
    assert left("def score_of():\n    global score\n    score = 1\nscore_of()", "score", score=1) == {"score": 1}
    assert left("print(globals()['score'])\n1 / 0", "score", score=1) == {}


def test_a_run_of_a_sweep_leaves_only_what_it_has_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left("if False:\n    score = 2", "score", score=1) == {"score": 1}
    monkeypatch.setenv("NBACCEL_SWEPT_VALUES", "lr=0.1")
    assert left("if False:\n    score = 2", "score", score=1) == {}
    assert left("best = max(best, 2)", "best", best=3) == {"best": 3}


@pytest.mark.parametrize("call", ["callbacks[0]()", "callbacks['end']()", "callbacks()", "callbacks.__wrapped__()"])
def test_a_callback_reads_what_the_notebook_had(call: str) -> None:
    space: dict[str, Any] = {"__name__": "__main__", "best": 1}
    exec("def shows(): return best", space)
    shows = space.pop("shows")
    held = {"callbacks[0]()": [shows], "callbacks['end']()": {"end": shows}, "callbacks()": functools.partial(shows)}
    names = {**space, "callbacks": held.get(call, functools.cache(shows))}
    task = CellTask(CellSource(f"result = {call}\nif False:\n    best = 2", "Cell In[1]"), names, ("result", "best"))
    shows.__globals__.clear()
    shows.__globals__.update(names)
    task.namespace = shows.__globals__
    task.run()
    assert task.results(0).values == {"result": 1, "best": 1}


def test_an_object_that_the_notebook_had_is_left_if_it_was_changed() -> None:
    assert left("scores.append(1)\n1 / 0", "scores", scores=[]) == {"scores": [1]}
    assert left("1 / 0\nscores.append(1)", "scores", scores=[]) == {}
    assert left("1 / 0\nscores = []", "scores", scores=[5]) == {}
    model = torch.nn.Linear(2, 1)
    assert (
        left("with torch.no_grad():\n    model.weight += 1\n1 / 0", "model", model=model, torch=torch)["model"] is model
    )


def test_a_tensor_that_lies_where_the_one_before_it_was_is_new() -> None:
    again = "del loss\n    loss = torch.ones(1)"
    code = f"old = id(loss)\nfor _ in range(100):\n    {again}\n    if id(loss) == old:\n        break"
    namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch, "loss": torch.ones(1)}
    task = CellTask(CellSource(code, "Cell In[1]"), namespace, ("old",))
    task.run()
    assert namespace["old"] == id(namespace["loss"])
    assert task.results(0).facts["not_asked"] == ["loss"]
