"""Cells as the work of a rank, without a rank: what goes back for the names of `--out`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel.launch.ipc.cell_task import CellSource, CellTask
from nbaccel.launch.objects.wrappers import plain


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
