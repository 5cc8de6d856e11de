"""What of a quantised model comes back from the ranks of a cell: the trained tensors, and never the base."""

from __future__ import annotations

import re
from pathlib import Path

from kernel.harness import RealKernel, accelerate

FINDS = f"import sys\nsys.path.append({str(Path(__file__).parent.parent)!r})\n"

TRAINS = f"""
{FINDS}
import torch
from four_bit_models import made, samples, trained_of

model = made()
optimizer = torch.optim.AdamW(trained_of(model), lr=0.1)
data = torch.utils.data.DataLoader(samples(), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for ids in data:
    accelerator.backward(model(ids).square().mean())
    optimizer.step()
    optimizer.zero_grad()
total = sum(weight.double().abs().sum() for weight in trained_of(model)).item()
"""

SETS_UP = FINDS + "import torch\nfrom four_bit_models import made, trained_of\n"

COUNTS = "sum(each.double().abs().sum() for each in {}).item()"


def test_a_name_that_the_notebook_does_not_have_becomes_the_trained_tensors(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(accelerate(TRAINS, start, flags="--out model,optimizer,total"), timeout_s=60)
    assert "model (what was trained; the quantised base stays in the ranks, " in cell.stdout
    assert kernel.value("[type(model).__name__, len(model), len(optimizer.param_groups[0]['params'])]") == [
        "TrainedTensors",
        9,
        6,
    ]
    trained = "[tensor for name, tensor in model.items() if 'running' not in name and 'num_b' not in name]"
    assert kernel.value(f"abs({COUNTS.format(trained)} - total) < 1e-9")
    kernel.do(SETS_UP + "mine = made()\nmodel.load_into(mine)")
    assert kernel.value(f"abs({COUNTS.format('trained_of(mine)')} - total) < 1e-9")


def test_a_model_of_the_notebook_takes_them_in_place_and_its_optimizer_goes_on(kernel: RealKernel, start: str) -> None:
    kernel.do(SETS_UP + "model = made()")
    kernel.do("optimizer = torch.optim.AdamW(trained_of(model), lr=0.1)\nkept = [model, optimizer]")
    kernel.do(accelerate(TRAINS, start, flags="--out model,optimizer,total"), timeout_s=60)
    assert kernel.value("[model is kept[0], optimizer is kept[1], len(optimizer.state)]") == [True, True, 6]
    assert kernel.value(f"abs({COUNTS.format('trained_of(model)')} - total) < 1e-9")
    assert kernel.value("optimizer.param_groups[0]['params'][0] is trained_of(model)[0]")


def test_an_optimizer_that_holds_the_base_says_how_to_make_it(kernel: RealKernel, start: str) -> None:
    body = TRAINS.replace("AdamW(trained_of(model)", "AdamW(model.parameters()")
    cell = kernel.run(accelerate(body, start, flags="--out optimizer"), timeout_s=60)
    assert cell.error is not None
    assert (
        "it holds a Params4bit, a quantised weight, which stays in the ranks: make the optimizer of" in cell.error.text
    )


def test_a_notebooks_own_model_is_trained_in_place_or_is_to_be_loaded_in_the_cell(
    kernel: RealKernel, start: str
) -> None:
    kernel.do(SETS_UP + "model = made()\nkept = model")
    kernel.do("base = model.blocks[0].base_layer.weight\nbefore = bytes(base.data.reshape(-1).tolist())")
    cell = kernel.run(accelerate(TRAINS.replace("model = made()", ""), start, flags="--out model,total"), timeout_s=60)
    if start != "fork":  # torch would make a plain Parameter of the weight
        assert cell.error is not None
        assert "model was loaded quantised: its weights cannot be sent to ranks" in cell.error.text
        return
    assert "model (updated in place, " in cell.stdout
    assert kernel.value("[model is kept, bytes(base.data.reshape(-1).tolist()) == before]") == [True, True]
    assert kernel.value(f"abs({COUNTS.format('trained_of(model)')} - total) < 1e-9")


def test_a_cell_that_prepares_nothing_trains_the_adapters_of_one_model(kernel: RealKernel, start: str) -> None:
    body = TRAINS.replace("model, optimizer, data = accelerator.prepare(model, optimizer, data)", "model.norm.eval()")
    body = body.replace("accelerator.backward(model(ids).square().mean())", "model(ids).square().mean().backward()")
    kernel.do(f"{body.replace('total', 'alone')}\ndel model, optimizer, data")
    cell = kernel.do(accelerate(body, start), timeout_s=60)
    assert re.search(r"brought back: .*model \(what was trained, [\d.]+ kB; the quantised base stays", cell.stdout)
    assert kernel.value("[abs(total - alone) < 1e-4 * alone, type(model).__name__]") == [True, "TrainedTensors"]


def test_a_model_of_which_nothing_is_trained_is_to_be_saved_in_the_cell(kernel: RealKernel, start: str) -> None:
    body = f"{FINDS}\nfrom four_bit_models import made\nmodel = accelerator.prepare(made(adapted=False))"
    cell = kernel.run(accelerate(body, start, flags="--out model"), timeout_s=60)
    assert cell.error is not None
    assert "a FourBitNet with quantised weights, of which nothing is trained: save it in the cell" in cell.error.text
