"""Objects without a form as data, made in the rounds of an outer loop: made again by their statements, then filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from features.cell_checkpoints.continued_cells import continued, executed, saved
from nbaccel.errors import CannotResume, CannotSave, CheckpointCorrupt
from nbaccel.features.cell_checkpoints.difference import CellDifference, Restored, StoredDifference
from nbaccel.features.cell_checkpoints.head_state import HeadState

ABOVE = """
import copy, torch
from torch.utils.data import DataLoader, Subset
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.rnn, self.act = torch.nn.Linear(4, 3), torch.nn.LSTM(3, 3), torch.relu
        self.log = []
    def forward(self, x):
        self.log.append(len(self.log))
        return self.rnn(self.act(self.fc(x)))[0]
class Holder:
    def __init__(self, net):
        self.net, self.best = net, None
losses, kept, data = [], [], torch.randn(20, 4)
"""
MAKE = """
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
scaler = torch.amp.GradScaler("cpu")
holder = Holder(model)
loader = DataLoader(Subset(data, torch.randperm(20)[:8].tolist()))
pair = (model, optimizer)
"""
ROUNDS = """
for turn in range(3):
    loss = model(data[:8]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    losses.append(loss.item())
    if turn == 1:
        holder.best, best_model = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
params, alias = list(model.parameters()), model
"""
KEEP = "kept.append(model.fc.weight)"
STEP = """
loss = model(data[:8]).square().mean()
optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
out = [loss.item(), optimizer.param_groups[0]["lr"], best_model(data[:1]).sum().item(), scaler.get_scale()]
out += [holder.net is model, kept[0] is model.fc.weight, params[0] is kept[0], alias is model, pair[1] is optimizer]
out += [loader.dataset.indices, model.log, holder.best["fc.weight"].sum().item(), losses]
"""
ROOTS = {"model", "optimizer", "scheduler", "scaler", "holder", "loader", "pair"}


def _saved(folder: Path) -> dict[str, Any]:
    notebook = executed(ABOVE)
    head = HeadState(notebook)
    executed(MAKE + ROUNDS + KEEP, notebook)
    difference = CellDifference.between(head, notebook, can_make=ROOTS.__contains__)
    difference.write(folder)
    assert set(difference.made) == ROOTS
    return notebook


def _continued(folder: Path, make: str = MAKE) -> tuple[dict[str, Any], Restored]:
    notebook = executed(ABOVE)
    restored = StoredDifference.read(folder).apply(HeadState(notebook), lambda *_: None)
    notebook.update(restored.names)
    executed("torch.manual_seed(77)\n" + make, notebook)
    assert restored.fill({"model": notebook["model"]}) == {}
    notebook.update(restored.fill(notebook))
    return notebook, restored


def test_the_model_of_a_fold_goes_on_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = _saved(tmp_path)
    other, restored = _continued(tmp_path)
    executed("model.fc.weight.data += 1\nlosses.append(7)", other)

    restored.write_again(other)

    for _ in range(3):
        executed(STEP, undisturbed)
        executed(STEP, other)
        assert other["out"] == undisturbed["out"]
        assert all(each for each in other["out"][4:9])


def test_another_model_than_that_of_the_fold_is_an_error(tmp_path: Path) -> None:
    _saved(tmp_path)

    with pytest.raises(CannotResume, match=r"^model, .*: made otherwise than in the run that is continued"):
        _continued(tmp_path, MAKE.replace("Net()", "torch.nn.Linear(4, 3)"))


def test_what_is_not_made_again_is_named(tmp_path: Path) -> None:
    _saved(tmp_path)
    notebook = executed(ABOVE)
    restored = StoredDifference.read(tmp_path).apply(HeadState(notebook), lambda *_: None)
    executed(MAKE + "del pair, loader", notebook)

    with pytest.raises(CannotResume, match=r"^loader, pair: not made again by the lines before the position"):
        restored.write_again(notebook)


def test_a_copy_of_a_model_above_the_loop_is_copied_again(tmp_path: Path) -> None:
    above = "import copy, torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(2, 1)\nmodels = []"
    loop = """
        best = copy.deepcopy(model)
        models.append(best)
        with torch.no_grad(): model.weight += 1; best.bias += 2
    """
    there = saved(tmp_path, above, loop)

    here, _ = continued(tmp_path, above)

    assert here["best"] is here["models"][0] is not here["model"]
    for name in ("model", "best"):
        assert repr(here[name].state_dict()) == repr(there[name].state_dict())


def test_an_object_with_a_state_that_no_statement_makes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CannotSave, match=r"net is a Linear, which no file of data can hold, .* Make it before the loop"
    ):
        saved(tmp_path, "import torch", "net = torch.nn.Linear(2, 1)")


@pytest.mark.parametrize(
    "changed",
    [
        {"made": ["__builtins__"]},
        {"made": ["missing"]},
        {"contents": [["('harm', ())", ["slots", []]]]},
        {"contents": [["('model', (('attributes', None),))", ["entries", [["__class__", 1]]]]]},
        {"copies": {"=1": ["o", 0]}, "records": [["at", "('losses', ())"]]},
        {"names": {"x": ["o", 0]}, "records": [["made", "('model', (('attributes', None), ('value', 'act')))"]]},
    ],
)
def test_a_hostile_file_makes_nothing_again(tmp_path: Path, changed: dict[str, Any]) -> None:
    _saved(tmp_path)
    path = tmp_path / "difference.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    with pytest.raises((CheckpointCorrupt, CannotResume)):
        _continued(tmp_path)[1].write_again({})


def test_models_of_folds_that_are_over_are_copies_with_their_own_numbers(tmp_path: Path) -> None:
    make = "torch.manual_seed(len(kept))\nmodel = Net()\nkept.append((model, [0]))\n"
    notebook = executed(ABOVE)
    head = HeadState(notebook)
    executed(make * 3 + "model.log.append(9)", notebook)
    CellDifference.between(head, notebook, can_make=lambda root: root == "model").write(tmp_path)
    other = executed(ABOVE)
    restored = StoredDifference.read(tmp_path).apply(HeadState(other), lambda *_: None)

    executed("model = Net()", other)
    other.update(restored.fill(other))

    assert [model.log for model, _ in other["kept"]] == [[], [], [9]]
    assert other["kept"][2][0] is other["model"]
    states = [[repr(model.state_dict()) for model, _ in each["kept"]] for each in (notebook, other)]
    assert states[0] == states[1]


@pytest.mark.parametrize("first", ["None", "model"])
def test_a_model_that_a_later_round_has_copied_is_copied_again(tmp_path: Path, first: str) -> None:
    make = f"model = Net()\nbest = {first}\n"
    notebook = executed(ABOVE)
    head = HeadState(notebook)
    executed(make + "best = copy.deepcopy(model)\nbest.fc.bias.data += 1", notebook)
    CellDifference.between(head, notebook, can_make=lambda root: root in ("model", "best")).write(tmp_path)
    other = executed(ABOVE)
    restored = StoredDifference.read(tmp_path).apply(HeadState(other), lambda *_: None)

    executed(make, other)
    other.update(restored.fill(other))

    for name in ("model", "best"):
        assert repr(other[name].state_dict()) == repr(notebook[name].state_dict())


@pytest.mark.parametrize("other", ["torch.nn.GELU()", "torch.nn.Linear(3, 3)"])
def test_a_model_of_other_modules_is_no_original_to_copy(tmp_path: Path, other: str) -> None:
    above = "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())\nkept = []"

    with pytest.raises(CannotSave, match=r"kept\[0\] is a Sequential"):
        saved(tmp_path, above, f"kept.append(torch.nn.Sequential(torch.nn.Linear(2, 3), {other}))")


def test_other_code_in_what_is_made_again_is_named(tmp_path: Path) -> None:
    _saved(tmp_path)

    with pytest.raises(
        CannotResume, match=r"^model, a copy of a model: made otherwise than in the run that is continued"
    ):
        _continued(tmp_path, MAKE.replace("Net()\n", "Net()\nmodel.act = torch.tanh\n"))
