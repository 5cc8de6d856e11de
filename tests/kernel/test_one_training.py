"""Cells whose ranks would train apart: an error before the first step, or a line when the cell ends."""

from __future__ import annotations

import re

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MAKES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 8)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
before = [weight.clone() for weight in model.parameters()]
"""

LOOP = """
for a, b in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(a), b)
    loss.backward()
    optimizer.step()
"""

BY_HAND = """
for a, b in loader:
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(a), b), list(model.parameters()))
    with torch.no_grad():
        for weight, gradient in zip(model.parameters(), gradients):
            weight -= 0.1 * gradient
"""

WITHOUT_SUPER = """
class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]
        self.defaults, self.state = {}, {}

    def step(self):
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight -= 0.1 * weight.grad

    def zero_grad(self):
        for weight in self.param_groups[0]["params"]:
            weight.grad = None

optimizer = Own(model.parameters())
"""


@pytest.mark.parametrize("start", ["fork", "zygote"])
def test_the_first_loop_that_people_write_is_refused_before_its_first_step(kernel: RealKernel, start: str) -> None:
    kernel.do(MAKES)
    cell = kernel.run(accelerate(LOOP, start=start, flags="--strict --out model"))
    error = cell.failed("NotPrepared")
    assert "AdamW.step in rank" in error.text
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in error.text
    assert "----> 6" in error.text.replace("---->    6", "----> 6"), "the line of the cell"
    assert kernel.value("all(torch.equal(new, old) for new, old in zip(model.parameters(), before))") is True


def test_separate_trainings_that_are_meant_run_to_their_end(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    cell = kernel.do(accelerate(LOOP, flags="--out model --independent"))
    assert "differ" not in cell.text


def test_an_optimizer_that_never_calls_torchs_is_refused_before_its_second_step(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    cell = kernel.run(accelerate(WITHOUT_SUPER + LOOP, flags="--strict --out model"))
    assert "has trained one model, and rank" in cell.failed("NotPrepared").text


def test_what_neither_a_step_nor_a_backward_shows_is_compared_when_the_cell_ends(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    cell = kernel.do(accelerate(BY_HAND, flags="--strict --out model"))
    assert re.search(r"^model differs between the ranks, and what came back is rank 0's", cell.stdout, re.M)


@pytest.mark.parametrize("flags", ["", "--out none"])
def test_models_that_nobody_asked_for_are_compared_too(kernel: RealKernel, flags: str) -> None:
    """As with fastai's optimizers, and with loops that update lists of tensors by hand."""
    kernel.do(MAKES)
    kernel.do("class Learner: pass\nlearn = Learner()\nlearn.model = model\nweights = list(model.parameters())")
    cell = kernel.do(accelerate(BY_HAND + "learn, weights", flags=f"--strict {flags}"))
    assert "model differs between the ranks: nothing kept it in step" in cell.stdout
    assert "trained in place" not in cell.stdout
    assert kernel.value("all(torch.equal(new, old) for new, old in zip(model.parameters(), before))") is True
    said = "trained in the ranks, and in the notebook as before: model; add model to --out"
    assert (said in cell.stdout) is bool(flags)


TRAINER = """
class Trainer:
    def __init__(self, model):
        self.model, self.log = model, []

    def train(self):
        from torch.nn.parallel import DistributedDataParallel
        import torch.distributed as dist
        model = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        self.log.append("trained")

trainer = Trainer(model)
"""


@pytest.mark.parametrize(("start", "n"), [("fork", 2), ("fork", 1), ("zygote", 2)])
def test_a_model_that_a_method_trained_comes_or_is_named(kernel: RealKernel, start: str, n: int) -> None:
    kernel.do(MAKES + TRAINER)
    begins = "import torch.distributed as dist\nif accelerator.num_processes > 1: accelerator.wait_for_everyone()\n"
    cell = kernel.do(accelerate(begins + "trainer.train()", start, n, flags="--out none"))
    said = "trained in the ranks, and in the notebook as before: trainer; add model to --out"
    assert said in cell.stdout
    assert kernel.value("all(torch.equal(new, old) for new, old in zip(model.parameters(), before))") is True
    cell = kernel.do(accelerate(begins + "trainer.train()", start, n, flags="--out model"))
    assert "trained in the ranks" not in cell.stdout
    assert kernel.value("trainer.model is model") is True
    assert kernel.value("any(torch.equal(new, old) for new, old in zip(model.parameters(), before))") is False
    assert kernel.value("trainer.log") == []
    kernel.do("before = [weight.clone() for weight in model.parameters()]")
    cell = kernel.do(accelerate(begins + "trainer.train()", start, n))
    assert re.search(r"^brought back: (trainer\.)?model trained in place \(178 parameters\)", cell.stdout, re.M)
    assert kernel.value("trainer.model is model") is True
    assert kernel.value("any(torch.equal(new, old) for new, old in zip(model.parameters(), before))") is False
    assert kernel.value("trainer.log") == ["trained"]


def test_each_name_of_what_all_ranks_did_alike_is_said_once(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    cell = kernel.do(accelerate("with torch.no_grad():\n    for each in model.parameters():\n        each.add_(1e-3)"))
    assert "all 2 ranks did the same work on model, and exchanged nothing" in cell.text


@pytest.mark.parametrize("flags", ["", "--out none"])
def test_a_model_that_a_function_of_the_notebook_trained_comes_or_is_named(kernel: RealKernel, flags: str) -> None:
    kernel.do(MAKES)
    kernel.do("def step(a, b):\n    return nn.functional.cross_entropy(model(a), b).backward()")
    kernel.do(
        "def epoch():\n    for a, b in loader: step(a, b)\n    optimizer.step()\n    history.append(1)\nhistory = []"
    )
    cell = kernel.do(accelerate("torch.manual_seed(1)\nepoch()", flags=f"--strict {flags}"))
    assert "each does the same work on the same data" in cell.text
    if flags:
        assert "trained in the ranks, and in the notebook as before: model; add model to --out" in cell.stdout
        assert "not brought back: history; add it to --out" in cell.stdout
        assert kernel.value("history") == []
    else:
        assert "brought back: model trained in place (178 parameters), history, optimizer\n" in cell.stdout
        assert "as before" not in cell.stdout
        assert kernel.value("history") == [1]
    stays = "all(torch.equal(new, old) for new, old in zip(model.parameters(), before))"
    assert kernel.value(stays) is bool(flags)


def test_a_model_is_named_first_and_what_is_left_out_is_counted(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    prepares = "prepared, optimizer, loader = accelerator.prepare(nn.Linear(8, 2), optimizer, loader)\n"
    body = prepares + "\n".join(f"{name} = [1]" for name in "abcdefgh")
    cell = kernel.do(accelerate(body, flags="--out none"))
    assert "not brought back: prepared, a, b, c, d, e and 4 more; add them to --out" in cell.stdout
    cell = kernel.do(accelerate(body))
    assert "brought back: prepared (18 parameters), " in cell.stdout
    assert kernel.value("type(prepared).__name__") == "Linear"
    assert kernel.value("[a, h]") == [[1], [1]]


@pytest.mark.parametrize("flags", ["", "--out none"])
def test_an_estimator_that_ranks_fitted_is_named(kernel: RealKernel, flags: str) -> None:
    kernel.do("class Estimator:\n    def fit(self):\n        self.coef_ = 1\nmodel = Estimator()")
    cell = kernel.do(accelerate("model.fit()", flags=flags))
    assert "each of 2 ranks changed model by itself, and they exchanged nothing: -n 1 does the work once" in cell.stdout
    assert ("not brought back: model; add it to --out" if flags else "brought back: model\n") in cell.stdout
    assert kernel.value("hasattr(model, 'coef_')") is not bool(flags)


def test_a_loop_that_goes_on_with_what_was_not_prepared_is_told_which(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    cell = kernel.run(accelerate("m, o, l = accelerator.prepare(model, optimizer, loader)\n" + LOOP))
    assert "the loop has to use what accelerator.prepare returned" in cell.text


def test_what_came_as_a_new_object_is_said_of_those_that_hold_the_old_one(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    kernel.do(
        "class Body: pass\nbody = Body()\nbody.net = model\nclass Has: pass\nhas = Has()\nhas.body = body\ndel model"
    )
    of_has = "torch.manual_seed(1)\nhas\n" + LOOP.replace("model(", "has.body.net(")
    cell = kernel.do(accelerate(of_has, flags="--out none"))
    assert "in the notebook as before: has; add body to --out" in cell.stdout
    cell = kernel.do(
        accelerate("torch.manual_seed(1)\nhas\n" + LOOP.replace("model(", "body.net("), flags="--out body")
    )
    assert "brought back: body (" in cell.stdout
    assert "still hold" in cell.stdout


HAS_A_BODY = f"""{MAKES}
class Body: pass
class Has: pass
net, body, has = model, Body(), Has()
body.net, has.body = net, body
del model
"""

TRAINS_THE_BODY = "torch.manual_seed(1)\nhas\n" + LOOP.replace("model(", "has.body.net(")


@pytest.mark.parametrize("start", ["fork", "zygote"])
def test_what_an_object_holds_is_trained_in_place(kernel: RealKernel, start: str) -> None:
    kernel.do(HAS_A_BODY)
    cell = kernel.do(accelerate(TRAINS_THE_BODY, start))
    assert "as before" not in cell.stdout
    assert "still hold" not in cell.stdout
    assert kernel.value("has.body is body and body.net is net") is True
    assert kernel.value("any(torch.equal(new, old) for new, old in zip(net.parameters(), before))") is False


def test_a_model_that_only_objects_hold_is_named_as_trained(kernel: RealKernel) -> None:
    kernel.do(HAS_A_BODY + "del net, body")
    cell = kernel.do(accelerate(TRAINS_THE_BODY))
    assert "brought back: has.body.net trained in place (178 parameters)" in cell.stdout


def test_what_was_prepared_is_the_same_in_all_ranks(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    prepared = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    cell = kernel.do(accelerate(prepared + LOOP.replace("loss.backward()", "accelerator.backward(loss)")))
    assert "differ" not in cell.text
    cell = kernel.do(accelerate(prepared + LOOP, flags="--out model,optimizer"))
    assert "differ" not in cell.text
    assert "steps" not in cell.stderr.replace("steps are counted", "")


def test_ranks_that_stay_are_compared_in_every_cell(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    kernel.do("%accelerate start --cpu -n 2 --strict")
    try:
        other = "torch.manual_seed(accelerator.process_index)\n"
        kernel.do("%%accelerate --only 0\n" + MAKES + LOOP)
        kernel.run("%%accelerate\n" + MAKES + other + LOOP).failed("NotPrepared")
    finally:
        kernel.do("%accelerate stop")


def test_what_a_class_leaves_out_of_its_copies_is_said_also_of_what_came(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    kernel.do(
        "class Fits:\n"
        "    net = None\n"
        "    def fit(self):\n"
        "        torch.manual_seed(0)\n"
        "        self.net = nn.Linear(8, 1)\n"
        "        self.net(x).mean().backward()\n"
        "        torch.optim.SGD(self.net.parameters(), 0.1).step()\n"
        "    def __getstate__(self):\n"
        "        return {}\n"
        "fits = Fits()"
    )
    how = "net = fits.net as the cell's last line, and --out net"
    cell = kernel.do(accelerate("fits.fit()", flags="--out none"))
    assert f"in the notebook as before: fits; {how}" in cell.stdout
    cell = kernel.do(accelerate("fits.fit()", flags="--out fits"))
    assert f"fits came without all that was trained, which a Fits leaves out of its copies: {how}" in cell.stdout
    kernel.do(accelerate("fits.fit()\nnet = fits.net", flags="--out net"))
    assert kernel.value("type(net).__name__") == "Linear"


def test_nobody_is_told_to_bring_what_cannot_travel(kernel: RealKernel) -> None:
    kernel.do(MAKES)
    kernel.do(
        "import threading\nclass Learner:\n    def __init__(self): self.lock, self.model = threading.Lock(), model"
    )
    body = "learner = Learner()\nlock = threading.Lock()\nseen = [1]"
    cell = kernel.do(accelerate(body, flags="--out none"))
    how = "model = learner.model as the cell's last line, and --out model"
    assert f"learner cannot leave its process: {how}" in cell.stdout
    assert "not brought back: lock; a lock, a thread, a file or a weak reference is in it" in cell.stdout
    assert "not brought back: seen; add it to --out" in cell.stdout
    cell = kernel.do(accelerate(body))
    assert "--out" not in cell.stdout
    said = "brought back: learner, seen; not brought back: lock (a lock); learner came without a lock\n"
    assert said in cell.stdout
    assert kernel.value("[learner.model is model, seen]") == [True, [1]]
    assert (
        "a part of learner stayed in its rank: a lock"
        in kernel.run("with learner.lock: pass").failed("StayedInRank").text
    )


def test_a_table_that_the_cell_made_or_wrote_into_is_named(kernel: RealKernel) -> None:
    kernel.do("import pandas as pd\ntable = pd.DataFrame({'a': [1.0, 2.0]})")
    body = "table['a'] = 5.0\nmade = {'a': pd.Series([1.0])}"
    cell = kernel.do(accelerate(body, n=1, flags="--out none"))
    assert "not brought back: table, made; add them to --out" in cell.stdout
    assert kernel.value("table.a.tolist()") == [1.0, 2.0]
    kernel.do("same = table")
    cell = kernel.do(accelerate(body, n=1))
    assert re.search("^brought back: (table, made|made, table)$", cell.stdout, re.M)
    assert kernel.value("[table is same, table.a.tolist(), made['a'].tolist()]") == [True, [5.0, 5.0], [1.0]]


def test_a_class_that_cannot_be_looked_at_loses_no_result(kernel: RealKernel) -> None:
    kernel.do("class Odd:\n    __module__ = property(lambda self: 1 / 0)\n    def __init__(self): self.part = self")
    cell = kernel.do(accelerate("odd = Odd()\nresult = 7", n=1, flags="--out result"))
    assert "brought back: result" in cell.stdout
    assert kernel.value("result") == 7
