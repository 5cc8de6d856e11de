"""An unmodified loop below the magic line trains one model on all ranks, with the numbers of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SETUP = """
import os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(90, 6, dtype=torch.float64)
y = torch.sin(x.sum(1, keepdim=True))
train_loader = DataLoader(TensorDataset(x[:70], y[:70]), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(x[70:], y[70:]), batch_size=7)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""

LOOP = """
history = []
for epoch in range(3):
    for a, b in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(model(a), b, reduction="sum").item() for a, b in test_loader)
    history.append(total / len(test_loader.dataset))
"""

SPLIT = "train_loader: each of 5 batches split over 2 ranks; gradients of model (129) averaged"

IS_RANK_1 = "os.environ['RAN' + chr(75)] == '1'"
"""A cell that names RANK knows ranks, and draws other numbers than the notebook would."""

_ZERO_GRAD = "        optimizer.zero_grad()\n"

WEIGHTS = "[p.flatten().tolist() for p in model.parameters()]"

A_FILE = 'torch.save(x, "x.pt")\n'
"""A cell that has written one is not started again with whole batches."""


def plain(kernel: RealKernel, setup: str = SETUP, loop: str = LOOP) -> Any:
    """What the loop leaves without the magic: weights, and what it has noted."""
    kernel.do(setup)
    kernel.do(loop)
    return kernel.value(f"[{WEIGHTS}, history]")


def are_near(one: Any, other: Any, tolerance: float = 1e-12) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(are_near(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return bool(abs(one - other) <= tolerance * max(1.0, abs(other)))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_line_alone_trains_as_one_process_would(kernel: RealKernel, start: str, n: int) -> None:
    expected = plain(kernel)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(LOOP, start, n))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert cell.stdout.count("split over") == (n > 1)
    assert "model trained in place" in cell.stdout


def test_what_is_done_is_said_once_before_the_first_step_on_parts(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    cell = kernel.do(accelerate(LOOP))
    assert cell.stdout.count(SPLIT) == 1
    assert "15 steps, loss " in cell.stdout


def test_strict_makes_an_error_of_it(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    error = kernel.run(accelerate(LOOP, flags="--strict")).failed("NotPrepared")
    assert "accelerator.prepare(model, optimizer, loader)" in error.text


def test_batches_of_their_own_take_fewer_steps(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    cell = kernel.do(accelerate(LOOP + "print(len(history))", flags="--batches each"))
    assert int(cell.printed.split()[-1]) < 15 + 3
    assert "trains on batches of its own" in cell.stdout


def test_a_loss_that_is_no_sum_over_samples_keeps_batches_whole(kernel: RealKernel) -> None:
    loop = LOOP.replace(
        "loss = nn.functional.mse_loss(model(a), b)", "loss = nn.functional.mse_loss(model(a), b) ** 0.5"
    )
    expected = plain(kernel, loop=loop)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(loop))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert (
        "train_loader: whole in each of 2 ranks, the same work: the power of a mean. -n 1 does it once; --batches"
        in cell.stdout
    )


def test_what_ranks_decide_apart_is_an_error_in_all_of_them(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    body = "for group in optimizer.param_groups:\n    group['lr'] *= 1 + int(os.environ['RANK'])\n" + LOOP
    error = kernel.run(accelerate(body)).failed("NotPrepared")
    assert "step with different learning rates (rank 0: 0.01, rank 1: 0.02)" in error.text


def test_a_rank_that_ends_early_leaves_equal_weights_where_ranks_have_batches_of_their_own(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    body = LOOP.replace("        optimizer.zero_grad()\n", "        if epoch >= 1 and os.environ['RANK'] == '1':\n"
                        "            break\n        optimizer.zero_grad()\n")  # fmt: skip
    cell = kernel.do(accelerate(body, flags="--batches each"))
    assert "the ranks have taken different numbers of steps (rank 0 9, rank 1 3)" in cell.stdout
    assert "model trained in place" in cell.stdout


@pytest.mark.parametrize("n", [2, 3])
def test_no_rank_goes_on_with_its_part_of_batches_when_another_has_left_the_loop(
    kernel: RealKernel, start: str, n: int
) -> None:
    expected = plain(kernel, loop=LOOP.replace("range(3)", "range(2)"))[0]
    kernel.do(SETUP)
    body = A_FILE + LOOP.replace("range(3)", f"range(3 if {IS_RANK_1} else 2)")
    cell = kernel.run(accelerate(body, start, n))
    error = cell.failed("NotPrepared")
    assert "over after so many steps (rank 0: 10" in error.text
    assert "and that of others is not (rank 1: 10)" in error.text
    assert "model trained in place" in cell.stdout, "all ranks had the same weights then"
    assert are_near(kernel.value(WEIGHTS), expected)


def test_a_refusal_in_mid_training_keeps_what_the_ranks_have_trained_together(kernel: RealKernel, start: str) -> None:
    """A program leaves a batch out where its loss is NaN, which it is in one rank's part."""
    until_then = LOOP.replace(_ZERO_GRAD, "        if len(history) == 14:\n            break\n" + _ZERO_GRAD)
    expected = plain(kernel, loop=until_then)[0]
    kernel.do(SETUP)
    leaves_one_out = f"if len(history) == 14 and {IS_RANK_1}:\n            history.append(0)\n            continue\n"
    body = A_FILE + LOOP.replace("        loss.backward()\n", f"        {leaves_one_out}        loss.backward()\n")
    cell = kernel.run(accelerate(body, start))
    assert "are at different batches" in cell.failed("NotPrepared").text
    assert "model trained in place" in cell.stdout
    assert are_near(kernel.value(WEIGHTS), expected)


def test_a_rank_that_leaves_batches_out_ends_in_an_error(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    body = LOOP.replace("        optimizer.zero_grad()\n", "        if epoch == 1 and os.environ['RANK'] == '1':\n"
                        "            break\n        optimizer.zero_grad()\n")  # fmt: skip
    error = kernel.run(accelerate(A_FILE + body)).failed("NotPrepared")
    assert "are at different batches, of which one was left out in some of them (rank 0: 9, rank 1: 13)" in error.text


def test_an_error_of_shapes_says_that_batches_came_in_parts(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    of_16 = "binary_cross_entropy(model(a).sigmoid(), torch.ones(16, 1, dtype=torch.float64))\n"
    body = LOOP.replace("mse_loss(model(a), b)\n", of_16)
    error = kernel.run(accelerate(body)).failed("ValueError")
    assert "each rank has a part of every batch" in error.text


def test_a_cell_that_prepares_is_left_alone(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    body = LOOP.replace("loss.backward()", "accelerator.backward(loss)")
    prepare = "model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)\n"
    cell = kernel.do(accelerate(prepare + body, flags="--seed 1"))
    assert "nbaccel:" not in cell.stdout


def test_a_loop_without_a_loader_is_said_to_do_the_same_work(kernel: RealKernel) -> None:
    loop = """
history = []
for step in range(5):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
"""
    expected = plain(kernel, loop=loop)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(loop))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert cell.stdout.count("nbaccel: no loader hands out batches") == 1


def test_an_update_by_hand_is_one_training(kernel: RealKernel) -> None:
    loop = """
w, history = torch.zeros(6, 1, dtype=torch.float64, requires_grad=True), []
for epoch in range(2):
    for a, b in train_loader:
        loss = ((a @ w - b) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad.zero_()
        history.append(loss.item())
"""
    kernel.do(SETUP)
    kernel.do(loop)
    expected = kernel.value("[w.flatten().tolist(), history]")
    kernel.do(SETUP)
    cell = kernel.do(accelerate(loop))
    assert are_near(kernel.value("[w.flatten().tolist(), history]"), expected)
    assert "Warning" not in cell.stdout + cell.stderr


def test_an_attempt_that_ran_out_of_memory_in_one_rank_is_made_again_by_all(kernel: RealKernel) -> None:
    kernel.do(SETUP + "from nbaccel import find_executable_batch_size")
    cell = kernel.do(
        accelerate("""
@find_executable_batch_size(starting_batch_size=32)
def train(batch_size):
    for step, (a, b) in enumerate(DataLoader(train_loader.dataset, batch_size=batch_size)):
        if batch_size > 16 and step == 1 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
    return batch_size
size = train()
""")
    )
    assert kernel.value("size") == 16
    assert "model trained in place" in cell.stdout


def test_ranks_that_stay_train_a_loop_and_then_what_is_prepared(kernel: RealKernel, start: str) -> None:
    kernel.do(SETUP)
    expected = plain(kernel)
    kernel.do(f"%accelerate start --cpu -n 2 --start {start}")
    try:
        kernel.do(SETUP)
        kernel.do("%%accelerate --out history\n" + SETUP + LOOP)
        assert are_near(kernel.value("history"), expected[1])
        prepared = "model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)\n"
        cell = kernel.do("%%accelerate\n" + prepared + LOOP.replace("loss.backward()", "accelerator.backward(loss)"))
        assert "nbaccel:" not in cell.stdout
        cell = kernel.do("%%accelerate\n" + LOOP.replace("loss.backward()", "accelerator.backward(loss)"))
        assert "nbaccel:" not in cell.stdout
    finally:
        kernel.do("%accelerate stop")


def test_what_is_made_for_one_batch_keeps_no_model_from_the_notebook(kernel: RealKernel) -> None:
    """The last batch's perturbation differs between ranks by right, also where the notebook has one of before."""
    attack = """
        history = []
        for a, b in train_loader:
            delta = torch.zeros_like(a, requires_grad=True)
            inner = torch.optim.SGD([delta], lr=0.5)
            inner.zero_grad()
            (-nn.functional.mse_loss(model(a + delta), b, reduction="sum")).backward()
            inner.step()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(a + delta.detach()), b)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    """
    expected = plain(kernel, loop=attack)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(attack))
    assert "differ" not in cell.stdout
    assert "model trained in place (129 parameters)" in cell.stdout
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)


def test_metrics_of_an_evaluation_count_each_sample_once(kernel: RealKernel) -> None:
    """torchmetrics adds up over a process group, and evaluations are whole in every rank."""
    pytest.importorskip("torchmetrics")
    kernel.do(SETUP + "import torchmetrics\nseen = torchmetrics.SumMetric()")
    loop = LOOP + "\nfor a, b in test_loader: seen.update(float(len(a)))\ncounted = seen.compute().item()"
    kernel.do(accelerate(loop))
    assert kernel.value("counted") == 20


def test_what_numpy_draws_goes_on_alike_in_all_ranks(kernel: RealKernel) -> None:
    """Numbers by Python and NumPy go on alike in all ranks, and a line says what that means for noise."""
    kernel.do(SETUP + "import numpy")
    loop = LOOP.replace("model(a)", "model(a + torch.from_numpy(numpy.random.randn(*a.shape)) * 0.01)", 1)
    cell = kernel.do(accelerate(loop + "\nprint('next', numpy.random.rand())"))
    assert cell.stdout.count("what the loop draws from NumPy or random is the same in all ranks") == 1
    drawn = re.findall(r"next ([\d.e-]+)", cell.stdout)  # by each rank, or once where its line came beside the other's
    assert len(set(drawn)) == 1


def test_a_loop_that_speaks_of_ranks_and_prepares_nothing_draws_one_order(kernel: RealKernel, start: str) -> None:
    """Its ranks are seeded apart; the samples of each batch are those of one process all the same."""
    expected = plain(kernel, loop="torch.manual_seed(5)\n" + LOOP)
    kernel.do(SETUP)
    cell = kernel.do(
        accelerate(LOOP + "\nif accelerator.is_main_process: print('rank 0 is here')", start, flags="--seed 5")
    )
    assert "rank 0 is here" in cell.stdout
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)


COUNTS_ON_WHOLE_BATCHES = """
history = []
print("begun")
for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16):
        loss = nn.functional.mse_loss(model(a.view(16, 6)), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
"""

STARTED_AGAIN = "as code does that counts on whole ones; started again with whole batches in each of 2 ranks"


def test_a_loop_that_fails_on_its_first_part_starts_again_with_whole_batches(kernel: RealKernel, start: str) -> None:
    expected = plain(kernel, loop=COUNTS_ON_WHOLE_BATCHES)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(COUNTS_ON_WHOLE_BATCHES, start))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert (
        "failed on its first part of a batch (RuntimeError: shape '[16, 6]' is invalid for input of size" in cell.text
    )
    assert cell.text.count(STARTED_AGAIN) == 1
    assert cell.text.count("begun") == 2


def test_the_first_error_is_shown_where_whole_batches_fail_too(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    loop = COUNTS_ON_WHOLE_BATCHES.replace("        loss =", "        assert len(history) != 1, len(a)\n        loss =")
    error = kernel.run(accelerate(loop)).failed("AssertionError")
    assert re.search(r"AssertionError: [79]\b", error.text)  # the first parts are of different sizes
    assert "With whole batches in every rank it failed, too" in error.text


MAKES_A_STATE = """
history, mean = [], torch.zeros(6, dtype=x.dtype)
for epoch in range(2):
    for a, b in DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16):
        loss = nn.functional.mse_loss(model(a - mean), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = 0.5 * mean + 0.5 * a.mean(0)
        history.append(loss.item())
"""


def test_a_loop_that_makes_a_state_of_its_batches_starts_again_with_whole_ones(kernel: RealKernel, start: str) -> None:
    expected = plain(kernel, loop=MAKES_A_STATE)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(MAKES_A_STATE, start))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert "NotPrepared: the loss uses mean, which the loop makes of its batches" in cell.text
    assert cell.text.count("started again with whole batches in each of 2 ranks, the same work") == 1


CUTS_ITS_BATCHES = """
history = []
for a, b in DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16):
    optimizer.zero_grad()
    for some, theirs in zip(a.split(4), b.split(4)):
        loss = nn.functional.mse_loss(model(some), theirs)
        (loss / 4).backward()
        history.append(loss.item())
    optimizer.step()
"""


def test_a_loop_that_cuts_its_batches_by_itself_has_whole_ones(kernel: RealKernel, start: str) -> None:
    expected = plain(kernel, loop=CUTS_ITS_BATCHES)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(CUTS_ITS_BATCHES, start))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert "the same work: samples that are picked by their place in the batch (loss = nn.functional.mse" in cell.text
    assert "started again" not in cell.text


def test_a_loop_that_cuts_its_batches_unseen_starts_again_with_whole_ones(kernel: RealKernel) -> None:
    """A larger part has more backwards, so that the ranks are at different steps after the first ones."""
    unseen = "((torch.tensor(a.tolist()[at:at + 4]).to(a), torch.tensor(b.tolist()[at:at + 4]).to(b))"
    loop = CUTS_ITS_BATCHES.replace("zip(a.split(4), b.split(4))", f"{unseen} for at in range(0, len(a), 4))")
    expected = plain(kernel, loop=loop)
    kernel.do(SETUP)
    cell = kernel.do(accelerate(loop))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert cell.text.count("started again with whole batches in each of 2 ranks, the same work") == 1


_STEP = "        optimizer.step()\n"

_CORRECT = "correct += int(((model(a) > 0) == (b > 0)).sum()); seen += len(a)"

PARTED = {
    "gradient noise": LOOP.replace(
        _STEP, f"        for p in model.parameters():\n            p.grad += 0.01 * torch.randn_like(p)\n{_STEP}"
    ),
    "a batch that is NaN": "x[37] = float('nan')\n"
    + LOOP.replace("        loss.backward()\n", "        if loss.isnan(): continue\n        loss.backward()\n"),
    "an accuracy": LOOP.replace(
        "    for a, b in train_loader:\n", "    correct = seen = 0\n    for a, b in train_loader:\n"
    )
    .replace(_STEP, f"{_STEP}        {_CORRECT}\n", 1)
    .replace("range(3)", "range(9)")
    + "    if correct / seen > 0.56: break\n",
}
"""Loops whose ranks decide or draw apart, each by its part of the batches."""


@pytest.mark.parametrize("name", PARTED)
def test_ranks_that_part_by_their_parts_of_batches_start_again_with_whole_ones(kernel: RealKernel, name: str) -> None:
    expected = plain(kernel, loop=PARTED[name])
    kernel.do(SETUP)
    cell = kernel.do(accelerate(PARTED[name]))
    assert are_near(kernel.value(f"[{WEIGHTS}, history]"), expected)
    assert cell.text.count("started again with whole batches in each of 2 ranks, the same work") == 1


@pytest.mark.full
def test_a_state_that_ranks_have_made_is_an_error_where_a_file_was_written(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    failed = kernel.run(accelerate('torch.save(x, "x.pt")' + MAKES_A_STATE))
    assert "the step was not taken" in failed.failed("NotPrepared").text
    assert "started again" not in failed.text


@pytest.mark.full
def test_what_has_written_a_file_or_trained_on_parts_does_not_start_again(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    written = COUNTS_ON_WHOLE_BATCHES.replace('print("begun")', 'torch.save(x, "x.pt")')
    later = COUNTS_ON_WHOLE_BATCHES.replace("a.view(16, 6)", "a if len(history) < 5 else a.view(16, 6)")
    for loop in (written, later):
        failed = kernel.run(accelerate(loop))
        assert STARTED_AGAIN not in failed.text
        assert "code that counts on batches of a fixed size has to ask len(x)" in failed.failed("RuntimeError").text


LEAVES_ITS_LAST_BATCH = """
def fit():
    for fold in range(2):
        torch.manual_seed(fold)
        net = nn.LazyLinear(1).double()
        steps = torch.optim.SGD(net.parameters(), 0.1)
        for a, b in DataLoader(TensorDataset(x[:48], y[:48]), batch_size=16):
            steps.zero_grad()
            nn.functional.mse_loss(net(a), b).backward()
            steps.step()
    return net

lazy = fit()
for batch in DataLoader(TensorDataset(x[:48], y[:48]), batch_size=16):
    data, target = batch
    batch_size, width = data.shape
    features, ours = 8, torch.ones(8)
    out = model(data)
    loss = nn.functional.mse_loss(out, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_last_batch_its_sizes_and_lazy_models_are_left_as_by_one_process(kernel: RealKernel, n: int) -> None:
    left = "[batch_size, width, features, ours.tolist(), data.tolist(), target.tolist(), out.tolist(), "
    left += "[part.tolist() for part in batch], lazy.weight.tolist()]"
    kernel.do(SETUP)
    kernel.do(LEAVES_ITS_LAST_BATCH)
    expected = kernel.value(left)
    kernel.do(SETUP)
    kernel.do(accelerate(LEAVES_ITS_LAST_BATCH, n=n))
    assert are_near(kernel.value(left), expected)


def test_steps_on_one_batch_are_counted(kernel: RealKernel) -> None:
    kernel.do(SETUP)
    loop = "a, b = next(iter(train_loader))\nfor _ in range(12):\n    nn.functional.mse_loss(model(a), b).backward()"
    assert "12 steps, loss" in kernel.do(accelerate(f"{loop}\n    optimizer.step()")).stdout


def test_flags_of_an_unmodified_loop_are_in_force_and_one_without_an_effect_is_said_before_the_first_step(
    kernel: RealKernel, start: str
) -> None:
    kernel.do(SETUP)
    cell = kernel.do(f"%%accelerate -n 2 --start {start} -p bf16 -a 4 --strategy fsdp\n{LOOP}")
    assert cell.stdout.splitlines()[0].endswith(f"2 ranks on CPU, {start}; bf16, accumulate 4; prepared: fsdp")
    assert cell.stderr.count("--strategy fsdp has no effect above an unmodified loop") == 1
    assert SPLIT in cell.stdout
    assert "batches of this loop are split" in kernel.value("__import__('nbaccel').last_run.text")
