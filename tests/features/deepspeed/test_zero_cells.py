"""Cells that train by DeepSpeed: results in place, errors by rank, a rank that is killed, a run that is stopped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.errors import RankDied

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed: make test-deepspeed"),
    pytest.mark.timeout(300),
]

MAKES = """
import os, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.up = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
    def forward(self, x):
        return self.head(torch.tanh(self.up(self.emb(x))))
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
words = torch.randint(0, 11, (48,), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(words, batch_size=4)
"""

TRAINS = """
from nbaccel import Accelerator, DeepSpeedPlugin
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage={stage}))
engine, stepping, batches = accelerator.prepare(model, optimizer, loader)
steps = 0
for x in batches:
    accelerator.backward(torch.nn.functional.cross_entropy(engine(x), x))
    {in_loop}
    stepping.step()
    stepping.zero_grad()
    steps += 1
"""


def _by_hand(names: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What one process trains, with the batches of both ranks."""
    torch.manual_seed(0)
    model = names["Net"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in names["words"].split(8):
        torch.nn.functional.cross_entropy(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trained_model_comes_back_into_the_notebooks_own(notebook: Any, stage: int) -> None:
    notebook.run(MAKES)
    names = notebook.names
    model, before = names["model"], [*map(id, names["model"].parameters())]
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out model,optimizer,steps\n{TRAINS.format(stage=stage, in_loop='pass')}"
    )
    assert cell.error is None
    assert (names["model"], names["steps"]) == (model, 6)
    assert [*map(id, model.parameters())] == before
    assert model.head.weight is model.emb.weight
    wanted = _by_hand(names)
    assert max(float((wanted[name] - value).abs().max()) for name, value in model.state_dict().items()) <= 1e-6
    model(torch.arange(3)).square().mean().backward()
    names["optimizer"].step()  # goes on here, with the states of the ranks
    assert {entry["step"].item() for entry in names["optimizer"].state.values()} == {7.0}


def test_a_run_that_is_stopped_before_a_step_brings_back_a_whole_model(notebook: Any) -> None:
    notebook.run(MAKES)
    model = notebook.names["model"]
    before = model.up.weight.detach().clone()
    limited = TRAINS.format(stage=3, in_loop="pass").replace("zero_stage=3)", "zero_stage=3), time_limit=0.01")
    cell = notebook.run(f"%%accelerate -n 2 --cpu --out model\n{limited}")
    assert "brought back: model (updated in place" in cell.stdout
    assert model.up.weight.shape == before.shape
    assert {type(weight) for weight in model.parameters()} == {torch.nn.Parameter}


def test_the_strategy_of_the_line_is_the_accelerators(notebook: Any) -> None:
    notebook.run(MAKES)
    cell = notebook.run(
        "%%accelerate -n 2 --cpu --strategy deepspeed --out kind\n"
        "engine, stepping = accelerator.prepare(model, optimizer)\nkind = str(accelerator.distributed_type)"
    )
    assert cell.error is None
    assert notebook.names["kind"] == "DEEPSPEED"


def test_an_error_of_one_rank_is_named_and_nothing_is_left(notebook: Any) -> None:
    notebook.run(MAKES)
    broken = "assert not (accelerator.process_index == 1 and steps == 2), 'a bad batch'"
    cell = notebook.run(f"%%accelerate -n 2 --cpu --out steps\n{TRAINS.format(stage=3, in_loop=broken)}")
    assert "a bad batch" in str(cell.error)
    again = notebook.run(f"%%accelerate -n 2 --cpu --out steps\n{TRAINS.format(stage=3, in_loop='pass')}")
    assert again.error is None
    assert notebook.names["steps"] == 6


@pytest.mark.parametrize(
    ("in_loop", "after", "says"),
    [
        ("pass", "accelerator.is_main_process and accelerator.save_state({folder!r})", "is in another collective"),
        ("accelerator.is_main_process and steps == 2 and accelerator.save_state({folder!r})", "", "out of step"),
    ],
)
def test_a_save_in_one_rank_alone_is_named(notebook: Any, in_loop: str, after: str, says: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    notebook.run(MAKES)
    training = TRAINS.format(stage=2, in_loop=in_loop.format(folder=folder)) + after.format(folder=folder)
    cell = notebook.run(f"%%accelerate -n 2 --cpu --out steps\n{training}")
    assert says in str(cell.error)
    assert "if is_main_process`" in str(cell.error) or "if accelerator.is_main_process`" in str(cell.error)
    assert not list(tmp_path.glob("checkpoint*"))


def test_a_killed_rank_is_named_and_nothing_is_left(notebook: Any) -> None:
    notebook.run(MAKES)
    killed = "accelerator.process_index == 1 and steps == 2 and os.kill(os.getpid(), 9)"
    cell = notebook.run(f"%%accelerate -n 2 --cpu --oom stop --out steps\n{TRAINS.format(stage=2, in_loop=killed)}")
    assert isinstance(cell.error, RankDied)
    assert "rank 1" in str(cell.error)


def test_a_rank_that_ran_out_of_memory_trains_again_in_parts(notebook: Any, tmp_path: Path) -> None:
    notebook.run(MAKES)
    died = str(tmp_path / "died")
    once = (
        f"accelerator.process_index == 1 and steps == 2 and not os.path.exists({died!r}) "
        f"and (open({died!r}, 'w').close(), os.kill(os.getpid(), 9))"
    )
    cell = notebook.run(f"%%accelerate -n 2 --cpu --out model\n{TRAINS.format(stage=2, in_loop=once)}")
    assert cell.error is None
    wanted, model = _by_hand(notebook.names), notebook.names["model"]
    assert max(float((wanted[name] - value).abs().max()) for name, value in model.state_dict().items()) <= 1e-6
