"""Whether a cell is written for several ranks is known by the names in it and in what it reads of the notebook."""

from __future__ import annotations

import textwrap
import types
from typing import Any

import pytest
import torch

from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.launching.tasks.function_task import FunctionTask


def library(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module


class FromALibrary:
    """Takes the place of a library's Trainer."""


FromALibrary.__name__ = "Trainer"
FromALibrary.__module__ = "transformers.trainer"


class OfTheUser:
    """Has a loop of its own."""


OfTheUser.__name__, OfTheUser.__module__ = "Trainer", "__main__"


class OwnTrainer(FromALibrary):
    """The user's, of the library's."""


def of_the_notebook(source: str, name: str) -> Any:
    """What `source` defines in the notebook."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace[name]


LOOP = "for x, y in loader:\n    optimizer.zero_grad()\n    loss = criterion(model(x), y)\n    loss.backward()\n"
FIT = f"def fit(model, loader):\n{textwrap.indent(LOOP, '    ')}"
PREPARES = "def fit(model):\n    return accelerator.prepare(model)"


@find_executable_batch_size(starting_batch_size=8)
def sized(batch_size: int) -> int:
    return batch_size


sized.__module__ = "__main__"

KNOW = {
    "the accelerator": ("model = accelerator.prepare(model)", {}),
    "one by another name": ("model = acc.prepare(model)", {"acc": Accelerator(cpu=True)}),
    "one that an object has": ("model = self.acc.prepare(model)", {}),
    "one that the cell makes": ("from accelerate import Accelerator as A\na = A()", {}),
    "ours that the cell imports": ("from nbaccel import set_seed\nset_seed(1)", {}),
    "a decorated function": ("sized()", {"sized": sized}),
    "a function of the notebook": ("fit(model)", {"fit": of_the_notebook(PREPARES, "fit")}),
    "a method of the notebook": (
        "task.fit()",
        {"task": of_the_notebook("class Task:\n    def fit(self): return notebook_launcher(f)", "Task")()},
    ),
    "a magic": ("get_ipython().run_cell_magic('time', '', 'fit(accelerator)')", {}),
    "DDP": ("net = torch.nn.parallel.DistributedDataParallel(net)", {"torch": torch}),
    "DDP by its short name": ("net = DDP(net)", {}),
    "torch.distributed": ("torch.distributed.init_process_group()", {"torch": torch}),
    "torch.distributed as it is imported": ("import torch.distributed as td\ntd.get_rank()", {}),
    "torch.distributed of the notebook": ("dist.get_rank()", {"dist": torch.distributed}),
    "a sampler for ranks": ("s = S(data)", {"S": torch.utils.data.distributed.DistributedSampler}),
    "a variable of launchers": ("import os\nrank = os.environ['LOCAL_RANK']", {}),
    "in a function of the cell": ("def rank():\n    return int(os.environ.get('RANK', 0))", {}),
    "deepspeed": ("import deepspeed\nengine, *_ = deepspeed.initialize()", {}),
    "a Trainer of the notebook": ("trainer.train()", {"trainer": FromALibrary()}),
    "the class of one": ("Trainer(model).train()", {"Trainer": FromALibrary}),
    "a subclass": ("t = T(model)", {"T": OwnTrainer}),
    "a module's": ("pl.Trainer(max_epochs=1).fit(net)", {"pl": library("pytorch_lightning")}),
    "one that is imported": ("from transformers import Seq2SeqTrainer\nSeq2SeqTrainer(m).train()", {}),
    "a module's that is imported": ("import lightning as L\nL.Trainer().fit(net)", {}),
}

KNOW_NOT = {
    "a loop": (LOOP, {"torch": torch}),
    "a loop in a function": ("fit(model, loader)", {"fit": of_the_notebook(FIT, "fit")}),
    "a distribution": (
        "from torch.distributions import Normal\ndist = Normal(0, 1)\ndist.sample()",
        {"torch": torch},
    ),
    "one of the notebook": ("dist.sample()", {"dist": torch.distributions.Normal(0, 1)}),
    "an accuracy": ("acc = accuracy(model)\nacc.append(1)\ndata.prepare()", {}),
    "a Trainer of the user's": ("Trainer(model).train()", {"Trainer": OfTheUser}),
    "a Trainer of the user's beside a library": (
        "from transformers import AutoModel\ntrainer = Trainer(AutoModel())",
        {"Trainer": OfTheUser},
    ),
    "a Trainer that the cell defines": ("class Trainer:\n    pass\nTrainer()", {}),
    "a library without its Trainer": ("import transformers\nm = transformers.AutoModel()", {}),
    "a word in a text": ("print('the accelerator of RANK 1')", {}),
    "a seed": ("torch.manual_seed(0)", {"torch": torch}),
    "a function of the user's that seeds": (
        "set_seed(0)",
        {"set_seed": of_the_notebook("def set_seed(n): torch.manual_seed(n)", "set_seed")},
    ),
    "nothing": ("", {}),
}


@pytest.mark.parametrize(("code", "namespace"), KNOW.values(), ids=KNOW)
def test_a_cell_that_is_written_for_ranks_is_known(code: str, namespace: dict[str, Any]) -> None:
    assert CellTask(CellSource(code, "Cell In[1]"), namespace).knows_ranks


@pytest.mark.parametrize(("code", "namespace"), KNOW_NOT.values(), ids=KNOW_NOT)
def test_a_cell_that_could_run_anywhere_knows_no_ranks(code: str, namespace: dict[str, Any]) -> None:
    assert not CellTask(CellSource(code, "Cell In[1]"), namespace).knows_ranks


def test_a_function_is_taken_to_know_ranks() -> None:
    assert FunctionTask(print).knows_ranks
