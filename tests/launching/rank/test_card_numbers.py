"""Which card a program means is known by its words: the first that it sees, or one that is counted by rank."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import types
import typing
from typing import Any

import pytest
import torch

from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.namespace.names import first_card_in, says_first_card

CFG = "class CFG:\n    lr = 0.1\n    device = torch.device('cuda:0')"
TRAIN = "def train():\n    def inner():\n        return model.to('cuda:0')\n    return inner()"
PREPARE = "model = accelerator.prepare(model)\n"
LOAD = "from transformers import Trainer\nmodel = AutoModel.from_pretrained('gpt2', "


def of_the_notebook(source: str, name: str) -> Any:
    """What `source` defines in the notebook."""
    namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(source, namespace)
    return namespace[name]


FIRST = {
    "a text": (f"{PREPARE}x = x.to('cuda:0')", {}, '"cuda:0"'),
    "a text where there is a card": ("d = 'cuda:0' if torch.cuda.is_available() else 'cpu'", {}, '"cuda:0"'),
    "a device by its number": ("d = torch.device('cuda', 0)", {"torch": torch}, 'torch.device("cuda", 0)'),
    "a move by number": (f"{PREPARE}x = x.cuda(0)", {}, ".cuda(0)"),
    "the current one": ("torch.cuda.set_device(0)", {"torch": torch}, ".set_device(0)"),
    "a map that fills all": (f"{LOAD}device_map='auto')", {}, 'device_map="auto"'),
    "a map of one": (f"{LOAD}device_map={{'': 0}})", {}, 'device_map={"": 0}'),
    "a map of one by its text": (f"{LOAD}device_map={{'': 'cuda:0'}})", {}, '"cuda:0"'),
    "a map of the notebook": (f"{LOAD}device_map=device_map)", {"device_map": "auto"}, "device_map='auto'"),
    "a function of the notebook": ("train()", {"train": of_the_notebook(TRAIN, "train")}, '"cuda:0"'),
    "a device of the notebook": (f"{PREPARE}x.to(device)", {"device": torch.device("cuda:0")}, "device"),
    "a text of the notebook": (f"{PREPARE}x.to(device)", {"device": "cuda:0"}, "device"),
    "a class of settings": ("x.to(CFG.device)", {"CFG": of_the_notebook(CFG, "CFG")}, "CFG"),
    "an object of settings": ("x.to(args.device)", {"args": types.SimpleNamespace(device="cuda:0")}, "args"),
    "a dictionary of settings": ("x.to(s['device'])", {"s": {"lr": 1, "device": "cuda:0"}}, "s"),
    "what prints a rank": (f"{PREPARE}if accelerator.process_index == 0: print(x.to('cuda:0'))", {}, '"cuda:0"'),
}

NOT_FIRST = {
    "no number": ("x = x.to('cuda').cuda()\nd = torch.device('cuda')", {"torch": torch}),
    "the accelerator's": ("x = x.to(accelerator.device)", {}),
    "a card by local rank": ("d = torch.device('cuda', local_rank)\nx.to('cuda:0')", {"torch": torch}),
    "a variable of launchers": ("d = torch.device('cuda', int(os.environ['LOCAL_RANK']))\ny = 'cuda:0'", {}),
    "a text that counts": ("d = f'cuda:{rank}'\ny = 'cuda:0'", {}),
    "a text that is formatted": ("d = 'cuda:%d' % rank\ny = 'cuda:0'", {}),
    "the current one by rank": ("torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\ny = 'cuda:0'", {}),
    "a move by rank": ("x.to(rank)\ny = 'cuda:0'", {}),
    "a move by the state's index": ("x.to(state.local_process_index)\ny = 'cuda:0'", {}),
    "a map by rank": (f"{LOAD}device_map={{'': PartialState().process_index}})\ny = 'cuda:0'", {}),
    "DDP's": ("model = DDP(model, device_ids=[rank])\ny = 'cuda:0'", {}),
    "several cards": ("a.to('cuda:0')\nb.to('cuda:1')", {}),
    "another card": ("a.to('cuda:1')", {}),
    "another card of the notebook": ("a.to(one).to('cuda:0')", {"one": torch.device("cuda", 1)}),
    "Lightning": ("pl.Trainer(devices=2).fit(net.to('cuda:0'))", {"pl": types.ModuleType("pytorch_lightning")}),
    "Lightning that is imported": ("import lightning.pytorch as L\nL.Trainer(devices=2).fit(net.to('cuda:0'))", {}),
    "a word of another thing": ("dtype = 'auto'\nx.get('', 0)\nscaler = GradScaler('cuda', 0.5)", {}),
    "autocast": ("with torch.autocast('cuda', dtype=torch.float16): pass", {"torch": torch}),
    "a sentence": ("print('it was on cuda:0 before')", {}),
    "False is no number": ("x.to(False)", {}),
    "a name that is not read": ("x = 1", {"device": "cuda:0"}),
}


@pytest.mark.parametrize(("code", "namespace", "words"), FIRST.values(), ids=FIRST)
def test_a_cell_that_means_the_first_card_says_by_which_words(code: str, namespace: dict[str, Any], words: str) -> None:
    assert CellTask(CellSource(code, "Cell In[1]"), namespace).first_card == words


@pytest.mark.parametrize(("code", "namespace"), NOT_FIRST.values(), ids=NOT_FIRST)
def test_a_cell_that_names_no_card_or_counts_them_means_not_the_first(code: str, namespace: dict[str, Any]) -> None:
    assert CellTask(CellSource(code, "Cell In[1]"), namespace).first_card == ""


def test_of_cells_to_come_only_the_notebooks_values_are_known() -> None:
    notebook = {"lr": 0.1, "device": torch.device("cuda", 0)}
    assert first_card_in(notebook) == "device"
    assert first_card_in(notebook | {"pl": types.ModuleType("pytorch_lightning")}) == ""
    assert first_card_in(notebook | {"second": "cuda:1"}) == ""


@pytest.mark.parametrize("module", [argparse, dataclasses, enum, typing, torch.nn.modules.transformer, inspect])
def test_no_code_is_beyond_it(module: types.ModuleType) -> None:
    code = compile(inspect.getsource(module), module.__name__, "exec")
    assert says_first_card([code], vars(module)) == ""


def test_a_cell_that_defines_classes_is_read_too() -> None:
    source = "class Net(Base, metaclass=Meta):\n    def on(self, x):\n        return x.to('cuda:0')\n    y: int = 1\n"
    assert says_first_card([compile(source, "", "exec")], {}) == '"cuda:0"'


class Proxy:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("nothing to see")


@pytest.mark.parametrize(
    "values", [{"device_map": {"": torch.ones(2)}}, {"proxy": Proxy()}], ids=["a map of tensors", "a proxy"]
)
def test_values_that_cannot_be_read_say_nothing(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proxy, "__module__", "__main__")
    code = compile("\n".join(values), "", "exec")
    assert [says_first_card([code], values), first_card_in(values)] == ["", ""]


def test_what_a_large_dictionary_holds_is_data() -> None:
    data = dict.fromkeys(range(1001), "cuda:0")
    assert first_card_in({"data": data}) == ""
    del data[0]
    assert first_card_in({"data": data}) == "data"
