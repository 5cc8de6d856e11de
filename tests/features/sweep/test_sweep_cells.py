"""Cells with `--sweep`: one run for each configuration, and lists in the notebook."""

from __future__ import annotations

import re
import time

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate

SCORES = """
import torch
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
for step in range(4):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if fold == 1 and lr > 0.05:
    raise ValueError("no such fold")
score = (fold, lr, loss.item())
print(score)
"""


def until_file(kernel: RealKernel, name: str, within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not (kernel.folder / name).exists():
        assert time.monotonic() < end, f"{name} has not been written"
        time.sleep(0.05)


def swept(body: str, flags: str, start: str = "auto") -> str:
    return accelerate(body, start, 1, flags=flags)


def test_out_gives_a_list_in_the_order_of_the_configurations_with_none_for_a_failure(
    kernel: RealKernel, start: str
) -> None:
    kernel.do("import shutil; shutil.rmtree('.nbaccel', ignore_errors=True)")
    kernel.do("score, lr = 'before', 'the notebook keeps this'")
    cell = kernel.do(swept(SCORES, "--sweep fold=0-2 lr=1e-1, 1e-2 --slots 2 --out score", start))
    score = kernel.value("score")
    assert [one and one[:2] for one in score] == [[0, 0.1], [0, 0.01], None, [1, 0.01], [2, 0.1], [2, 0.01]]
    assert kernel.value("lr") == "the notebook keeps this"
    assert "6 runs: 5 done, 1 failed on 2 slots" in cell.stdout
    assert "ValueError: no such fold" in cell.stdout
    assert "brought back: score (a list of 6, None for 1 run that did not end well)" in cell.stdout
    assert cell.panels == 1
    assert "image/png" in cell.panel
    assert "3. fold=1, lr=0.1: failed on slot" in cell.panel["text/plain"]
    # The same cell again: five are found, and one is tried once more.
    again = kernel.do(swept(SCORES, "--sweep fold=0-2 lr=1e-1, 1e-2 --slots 2 --out score", start))
    assert "5 of 6 runs finished earlier (same source, values and seed" in again.stdout
    assert kernel.value("score") == score
    # A single run with the same seed computes the same.
    kernel.do(swept(f"fold, lr = 2, 0.1\n{SCORES}", "--seed 0 --out score", start))
    assert kernel.value("score") == score[4]


def test_the_table_shows_waiting_running_and_finished_runs(kernel: RealKernel) -> None:
    body = """
    import time
    for step in range(6):
        accelerator.log({"acc": step / 6})
        time.sleep(0.25)
    if fold == 3:
        raise ValueError("boom")
    """
    cell = kernel.do(swept(body, f"--sweep fold=0-3 run={id(kernel)} --slots 2"))
    texts = [frame["text/plain"] for frame in cell.frames]
    assert any("2 running, 2 waiting" in text and ": waiting" in text for text in texts)
    pages = [frame["text/html"] for frame in cell.frames if "text/html" in frame]
    assert any("○ waiting" in page and "● running" in page for page in pages)
    assert "3 done, 1 failed" in cell.panel["text/plain"]


def test_an_interrupt_ends_all_and_the_list_has_what_was_done(kernel: RealKernel) -> None:
    body = f"""
    import time
    score = {{"fold": fold, "kernel": {id(kernel)}}}
    if fold > 0:
        print("waits", flush=True)
        open(f"waits-{{fold}}", "w").close()
        for step in range(1000):
            accelerator.log({{"acc": 1.0}})
            time.sleep(0.05)
    """
    running = kernel.begin(swept(body, "--sweep fold=0-4 --slots 2 --out score"))
    until_file(kernel, "waits-1")
    until_file(kernel, "waits-2")
    kernel.interrupt()
    cell = running.end(timeout_s=30)
    assert "interrupted" in cell.failed("KeyboardInterrupt").evalue
    score = kernel.value("score")
    assert len(score) == 5
    assert score[0]["fold"] == 0
    assert score[1:] == [None] * 4
    assert not (kernel.folder / "waits-3").exists()


def test_a_run_at_its_time_limit_does_not_bring_back_what_the_notebook_had(kernel: RealKernel, start: str) -> None:
    kernel.do("import shutil; shutil.rmtree('.nbaccel', ignore_errors=True)")
    kernel.do("score = 777")
    body = "import time\ntime.sleep({})\nscore = 5"
    cell = kernel.do(swept(body.format("x"), "--sweep x=0,60 --slots 2 --time-limit 2s --out score", start))
    assert kernel.value("score") == [5, None]
    assert "score (a list of 2, None for 1 run stopped before it had assigned score)" in cell.stdout
    kernel.do("score = 777")
    cell = kernel.do(swept(body.format("60"), "--time-limit 2s --out score", start))
    assert kernel.value("score") == 777
    assert "not brought back: score (the cell ended without assigning it)" in cell.stdout


def test_a_name_that_nothing_reads_is_said_before_the_runs(kernel: RealKernel) -> None:
    kernel.do("lr = 100")
    cell = kernel.do(swept("r = lr", "--sweep lrr=1,inf --out r"))
    assert "lrr is swept, and nothing in the cell reads it: runs that differ in it alone are equal" in cell.stdout
    assert kernel.value("r") == [100, 100]
    kernel.do(swept("r = lr > 5", "--sweep lr=1,inf --out r"))
    assert kernel.value("r") == [False, True]


def test_a_mistake_of_all_runs_is_said_once_with_the_place_of_its_traceback(kernel: RealKernel) -> None:
    cell = kernel.do(swept("def step():\n    return undefined[fold]\nstep()", "--sweep fold=0-3 --slots 2"))
    lines = cell.stdout.splitlines()
    assert lines[1].startswith("sweep of Cell In[")
    assert "4 runs: 4 failed on 2 slots" in lines[1]
    assert lines[2].endswith(": NameError: name 'undefined' is not defined")
    assert lines[3] == "3 more runs failed alike"
    log = re.fullmatch(r"the traceback of a failed run is at the end of its log, such as (\S+)", lines[4])
    assert log is not None
    said = (kernel.folder / log[1]).read_text()
    assert "line 3, in step" in said
    assert "return undefined" in said


BEGINNERS = """
import torch, time
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
def fit(model_class, act, bias, shape, accelerator):
    print("fitting", bias)
    model = model_class()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = act(model(torch.ones(shape))).mean()
    accelerator.backward(loss)
    optimizer.step()
    if bias is None:
        raise RuntimeError("no bias given")
    return {"loss": loss.item(), "model": model_class.__name__}
def folds(fold):
    time.sleep(30 * (fold > 1))
    return fold
"""


def test_sweeps_that_a_beginner_writes(kernel: RealKernel) -> None:
    kernel.do("import shutil; shutil.rmtree('.nbaccel', ignore_errors=True)")
    kernel.do(BEGINNERS)
    call = "runs = nbaccel.sweep(fit, model_class=[Net], act=[torch.relu, abs, lambda x: x], bias=[True, None], "
    call = f"import nbaccel\n{call}shape=[(2, 4)], slots=2, cpu=True)"
    cell = kernel.do(call)
    assert "sweep of fit: 6 runs: 3 done, 3 failed on 2 slots" in cell.stdout
    assert "2. model_class=Net, act=relu, bias=None, shape=(2, 4): failed on slot" in cell.stdout
    assert "will be done again" not in cell.stdout
    assert kernel.value("[run.value and run.value['model'] for run in runs]") == ["Net", None] * 3
    assert "3 of 6 runs finished earlier (same source, values and seed" in kernel.do(call).stdout
    running = kernel.begin("runs = nbaccel.sweep(folds, fold=range(5), slots=1, cpu=True)")
    running.until(lambda cell: bool(cell.frames) and "3. fold=2: running" in cell.frames[-1]["text/plain"])
    kernel.interrupt()
    cell = running.end(timeout_s=30)
    assert "5 runs: 2 done, 3 stopped. nbaccel.last_run.runs has them" in cell.failed("KeyboardInterrupt").evalue
    assert cell.panel["text/plain"].splitlines()[-2:] == ["4. fold=3: not begun", "5. fold=4: not begun"]
    assert kernel.value("[run.value for run in nbaccel.last_run.runs]") == [0, 1, None, None, None]


RAW = """
import torch, time
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for batch in torch.utils.data.DataLoader(torch.arange(64.0).view(16, 4) / 64, 4):
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.process_index == 1 and kind == "crash":
        raise ValueError("eleven classes")
    if accelerator.process_index == 1 and kind == "hang":
        time.sleep(1000)
world = accelerator.num_processes
score = (kind, world, model.weight.detach().tolist())
"""


def test_n_is_the_number_of_ranks_of_each_run(kernel: RealKernel, start: str) -> None:
    """A loop that prepares nothing trains on both; rank 1 ends its own run alone."""
    kernel.do("import shutil; shutil.rmtree('.nbaccel', ignore_errors=True)")
    flags = f"--start {start} --out score"
    line = f"%%accelerate --cpu --sweep kind=good,hang,crash,fine lr=0.1 -n 2 --slots 2 --hang-timeout 5 {flags}"
    cell = kernel.do(f"{line}\n{RAW}")
    score = kernel.value("score")
    assert [one and one[:2] for one in score] == [["good", 2], None, None, ["fine", 2]]
    assert score[0][2] == score[3][2]
    assert "4 runs, 2 at a time, each: 2 ranks on CPU, " in cell.stdout
    assert "4 runs: 2 done, 2 failed on 2 slots" in cell.stdout
    assert "rank 1, ValueError: eleven classes" in cell.stdout
    assert "rank 1 seems to hold up the others" in cell.stdout
    kernel.do(f"%%accelerate --cpu -n 2 --seed 0 {flags}\nkind, lr = 'good', 0.1\n{RAW}")
    assert kernel.value("score") == score[0]


@pytest.mark.parametrize(
    ("flags", "body", "sentence"),
    [
        ("--sweep lr=1,2", "x = 1\nfor lr in (3,):\n    pass", "line 3 of the cell binds lr, which --sweep sets"),
        ("--sweep fold=0-1 -n 2 --gpus-per-run 1", "print(fold)", "use --gpus-per-run 2"),
        ("--sweep fold=0-1 --bg", "print(fold)", "--sweep and --bg exclude each other"),
        ("--slots 2", "print(1)", "--slots 2 is about the runs of a sweep, and this cell has no --sweep"),
        ("--sweep x=In", "print(x)", "--sweep x=In: In is the name of a list in the notebook, and here it would be"),
        ("--sweep x=1,2, --slots 2", "print(x)", "--slots stands in the values of x: a flag stands behind a blank"),
        ("--sweep seed=a,b", "print(seed)", "a seed is a whole number from 0 on; got 'a'"),
    ],
)
def test_what_a_sweep_cannot_be_is_one_sentence(kernel: RealKernel, flags: str, body: str, sentence: str) -> None:
    cell = kernel.run(f"%%accelerate --cpu {flags}\n{body}")
    assert cell.status == "error"
    assert sentence in (cell.stderr if cell.error is None else cell.error.text)


def test_nothing_survives_the_kernels_sigkill(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel")
    body = """
    import subprocess, time
    subprocess.Popen(["sleep", "1000"])
    open(f"begun-{fold}", "w").close()
    time.sleep(1000)
    """
    kernel.begin(swept(body, "--sweep fold=0-3 --slots 2"))
    until_file(kernel, "begun-0")
    until_file(kernel, "begun-1")
    kernel.kill()
    assert kernel.survivors(within_s=5.0) == {}
