"""The panel of a run in a real kernel: what is sent while it runs, and what a saved notebook keeps of it."""

from __future__ import annotations

import base64
import html
import json
import re
import textwrap

import pytest

from fixtures.kernels import Kernels
from kernel.harness import Cell, RealKernel, accelerate
from kernel.test_raw_backward import TRAINS as CALLS_BACKWARD

TRAINS = """
import time, torch
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn({samples}, 8), torch.arange({samples}) % 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({{"loss": loss, "acc": 0.5}})
    {then}
"""


def trains(steps: int, then: str = "pass") -> str:
    """A cell that trains so many steps on two ranks."""
    return TRAINS.format(samples=steps * 8, then=then)


def numbers(panel: dict[str, str]) -> list[str]:
    return panel["text/plain"].splitlines()


@pytest.mark.slow
def test_a_run_of_500_steps_leaves_one_picture_and_its_numbers(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(trains(500)))
    assert cell.panels == 1
    assert sorted(cell.panel) == ["image/png", "text/plain"]
    assert base64.b64decode(cell.panel["image/png"]).startswith(b"\x89PNG")
    assert len(json.dumps(cell.panel)) + len(cell.text) < 100_000
    words = cell.panel["text/plain"]
    assert re.search(r"^Cell In\[\d+\]: done in .*, 500 steps$", words, re.M)
    assert re.search(r"^loss \d\S* \(rank 0 \S+, rank 1 \S+, lowest", words, re.M)
    assert re.search(r"^acc 0.5000", words, re.M)
    assert re.search(r"^rank 0: host .* GB, peak .* GB$", words, re.M)
    assert re.search(r"^rank 1: host .* GB, peak .* GB$", words, re.M)
    said = re.search(r"^done in .*, 500 steps, loss \S+, acc 0.5000,.* peak memory .* GB$", cell.stdout, re.M)
    assert said is not None, cell.stdout
    again = kernel.do("%accelerate last")
    assert [sorted(shown) for shown in again.displays] == [["text/html", "text/plain"], ["image/png", "text/plain"]]
    assert again.displays[1]["text/plain"] == again.displays[0]["text/plain"] == words
    assert again.stdout == f"Cell In[{cell.number}]: {said[0]}\n"
    assert kernel.value("__import__('nbaccel').last_run.text") == words


@pytest.mark.slow
def test_the_panel_follows_the_run_at_two_frames_per_second_at_most(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(trains(120, then="time.sleep(0.05)")))
    frames = cell.frames[:-2]  # the last one as a panel, and the picture
    assert len(frames) >= 3
    assert len(frames) <= 1 + 2 * cell.seconds
    assert all("text/html" in frame and "<script" not in frame["text/html"] for frame in frames)
    assert len({frame["text/html"] for frame in frames}) == len(frames)
    heights = [tuple(re.findall(r'style="(?:max-)?height:(\d+)px', frame["text/html"])) for frame in frames]
    assert heights == sorted(heights, key=len), "a frame may come before the first value of acc"
    assert len(set(heights)) <= 2
    assert max(len(json.dumps(frame)) for frame in frames) < 18_000


SPEED = r"[\d.,]+ steps/s"

EVALUATES = """
import time, torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader, held_out = accelerator.prepare(
    model, optimizer, DataLoader(torch.randn(96, 8), 4), DataLoader(torch.randn(48, 8), 4)
)
"""
EPOCHS = """
for epoch in {epochs}:
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    with torch.no_grad():
        for x in held_out:
            model(x)
            time.sleep(0.2)
"""


def bars(cell: Cell) -> list[float]:
    """How far the bar was, frame by frame."""
    html = [frame["text/html"] for frame in cell.frames if "text/html" in frame]
    return [float(value) for frame in html for value in re.findall(r'<progress max="1" value="([\d.]+)"', frame)]


@pytest.mark.slow
def test_an_evaluation_stands_beside_the_place_of_the_training_whose_bar_never_goes_back(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(EVALUATES + EPOCHS.format(epochs="accelerator.epochs(2)")))
    places = [words for frame in cell.frames for words in frame["text/plain"].splitlines() if "evaluating" in words]
    assert len(places) >= 2, [frame["text/plain"] for frame in cell.frames]
    for words in places:
        assert re.match(r"epoch ([12])/2, step (12|24), (50|100) %, evaluating, batch \d/6, ", words), words
    assert any(" s left" in words for words in places)
    assert bars(cell) == sorted(bars(cell))
    assert bars(cell)[-1] == 1.0
    said = re.search(r"^done in [^,]*, 24 steps, .*$", cell.stdout, re.M)
    assert said is not None, cell.stdout
    speeds = re.findall(SPEED, said[0] + cell.panel["text/plain"] + cell.frames[-2]["text/html"])
    assert len(speeds) == 3
    assert len(set(speeds)) == 1


RAW = """
import time, torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x in DataLoader(torch.randn(240, 8), 8):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_loop_that_prepares_nothing_has_samples_per_second_and_a_learning_rate(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(RAW))
    frames = [frame["text/plain"] for frame in cell.frames[:-2]]
    assert any("lr 0.05" in words for words in frames), frames
    found = re.search(r"^([\d.,]+) steps/s, ([\d.,]+) samples/s", cell.panel["text/plain"], re.M)
    assert found is not None, cell.panel["text/plain"]
    assert float(found[2]) == pytest.approx(8 * float(found[1]), rel=0.05), "each step is a batch of 8, on both ranks"
    alone = RAW.replace("for x in DataLoader(torch.randn(240, 8), 8):", "for x in torch.randn(30, 8, 8):")
    cell = kernel.do(accelerate(alone, n=1))
    assert any("lr 0.05" in frame["text/plain"] for frame in cell.frames[:-2])
    assert re.search(r"^[\d.,]+ steps/s$", cell.panel["text/plain"], re.M)


@pytest.mark.slow
def test_steps_of_a_cell_in_ranks_that_stay_are_its_own(kernel: RealKernel) -> None:
    kernel.do("%accelerate start -n 2 --cpu")
    try:
        kernel.do("%%accelerate\n" + EVALUATES + EPOCHS.format(epochs="range(1)").replace("0.2", "0"))
        cell = kernel.do("%%accelerate\n" + EPOCHS.format(epochs="accelerator.epochs(2)").replace("0.2", "0"))
    finally:
        kernel.do("%accelerate stop")
    assert re.search(r"^done in [^,]*, 24 steps, ", cell.stdout, re.M), cell.stdout
    assert re.search(r": done in [^,]*, 24 steps$", numbers(cell.panel)[0])
    places = [words for frame in cell.frames for words in frame["text/plain"].splitlines() if "epoch" in words]
    assert all(re.match(r"epoch [12]/2, (batch|step)", words) for words in places), places
    assert bars(cell) == sorted(bars(cell))


@pytest.mark.slow
def test_a_run_that_memory_started_again_says_the_seconds_of_all_and_the_steps_of_the_last_attempt(
    kernel: RealKernel,
) -> None:
    kernel.do("import os; attempts = 'attempts.txt'; open(attempts, 'w').close()")
    body = """
        import time, torch
        open(attempts, "a").write("x")
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, torch.utils.data.DataLoader(torch.randn(48, 8), 4)
        )
        time.sleep(1.5)
        for x in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
            if len(open(attempts).read()) == 1 and len(x) == 4 and accelerator.process_index == 0:
                if (steps := globals().get("steps", 0) + 1) == 6:
                    raise torch.OutOfMemoryError("CPU out of memory. Tried to allocate 9.00 GiB")
    """
    cell = kernel.do(accelerate(body, n=1))
    assert cell.text.count("started again with") == 1, cell.text
    said = re.search(r"^done in ([\d.:]+)( s)?, 12 steps in the last of 2 attempts, ", cell.stdout, re.M)
    assert said is not None, cell.stdout
    assert re.search(
        rf": done in {said[1]}{said[2] or ''}, 12 steps in the last of 2 attempts$", numbers(cell.panel)[0]
    )
    assert float(said[1].rpartition(":")[2]) >= 3.0
    assert any(words.startswith("attempt 2") for frame in cell.frames for words in frame["text/plain"].splitlines())


@pytest.mark.slow
def test_the_bars_of_all_ranks_are_seen_while_they_run_and_their_last_states_are_kept(kernel: RealKernel) -> None:
    training = """
        import time
        from tqdm.auto import tqdm, trange
        rank = accelerator.process_index
        accelerator.log({"acc": 0.5})
        for epoch in trange(3, desc="epochs"):
            for batch in tqdm(range(6 + rank), desc=f"epoch {epoch}", leave=False):
                time.sleep(0.15)
        for item in accelerator_bar(range(2), desc="main only"):
            pass
        print("trained")
        """
    imports = "from nbaccel.utils import tqdm as accelerator_bar\n"
    cell = kernel.do(accelerate(imports + textwrap.dedent(training)))
    live = "\n".join(html.unescape(frame["text/html"]) for frame in cell.frames if "text/html" in frame)
    for rank in (0, 1):
        assert re.search(rf"^.*\[rank {rank}\] epochs:.*/3 ", live, re.M), live
        assert re.search(rf"^.*\[rank {rank}\] epoch \d:.*/{6 + rank} ", live, re.M), live
    bars = [re.sub(r"\|.*", "", line) for line in cell.stdout.splitlines() if "100%" in line]
    assert sorted(bars) == ["[rank 0] epochs: 100%", "[rank 0] main only: 100%", "[rank 1] epochs: 100%"]
    assert cell.stderr == ""
    assert "trained\n" in cell.stdout  # marked once a bar of one rank has come before
    assert "\r" not in cell.text
    assert "epochs" not in json.dumps(cell.panel)
    assert len(cell.text) < 800


def test_a_short_run_without_numbers_leaves_no_panel(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate("print('hi')"))
    if cell.seconds < 2.0:  # on a machine that is very busy no run is short
        assert cell.panels == 0
        assert cell.stdout.count("\n") == 2


def test_the_panel_of_a_failed_run_says_so(kernel: RealKernel) -> None:
    cell = kernel.run(accelerate(trains(5, then="1 / (accelerator.process_index - 1)")))
    cell.failed("ZeroDivisionError")
    assert re.search(r": failed after .*: rank 1, ZeroDivisionError: division by zero$", numbers(cell.panel)[0])
    assert re.search(r"^failed after .*: rank 1, ZeroDivisionError", cell.stdout, re.M)


@pytest.mark.slow
def test_the_panel_of_a_stopped_run_says_so(kernel: RealKernel) -> None:
    running = kernel.begin(accelerate(trains(100_000)))
    running.until(lambda cell: cell.panels)
    kernel.interrupt()
    cell = running.end()
    cell.failed("KeyboardInterrupt")
    assert re.search(r": stopped after .* steps?$", numbers(cell.panel)[0])
    assert "image/png" in cell.panel


@pytest.mark.slow
def test_runs_of_one_cell_share_one_display(kernel: RealKernel) -> None:
    cell = kernel.do(
        """
        import nbaccel
        def train(lr):
            from nbaccel.base.events import Metric, emit
            for step in range(20):
                emit(Metric({"loss": lr / (step + 1)}, step))
        runs = [nbaccel.launch(train, 2, (lr,), cpu=True) for lr in (0.1, 0.2, 0.4)]
        """
    )
    assert cell.panels == 1
    assert [sorted(frame) for frame in cell.frames[-2:]] == [["text/html", "text/plain"], ["image/png", "text/plain"]]
    assert base64.b64decode(cell.panel["image/png"]).startswith(b"\x89PNG")
    assert [re.sub(r"in .*? s", "in 1 s", row.split(", peak")[0]) for row in numbers(cell.panel)] == [
        f"{at}. train({lr}): done in 1 s, 20 steps, loss {loss}"
        for at, lr, loss in ((1, 0.1, "0.005"), (2, 0.2, "0.01000"), (3, 0.4, "0.02000"))
    ]
    shown = kernel.run("runs[0].plot('loss')").succeeded()
    assert shown.result is not None
    assert "image/png" in shown.result
    assert kernel.value("[run.history.curve('loss').mean[0] for run in runs]") == [0.1, 0.2, 0.4]
    assert (
        kernel.value("[base.__module__ for base in type(runs[0].figure(size=(3, 2))).__mro__][1]")
        == "matplotlib.figure"
    )


@pytest.mark.slow
def test_a_run_in_the_kernel_itself_has_a_panel_and_a_picture_too(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(trains(20, then="time.sleep(0.05)"), start="inline", n=1))
    assert cell.panels == 1
    live = [frame for frame in cell.frames if "text/html" in frame]
    assert len(live) >= 3  # two seconds at least, and the last one
    assert "Stop: interrupt the kernel" in live[0]["text/html"]
    assert sorted(cell.panel) == ["image/png", "text/plain"]
    assert re.search(r"^done in .*, 40 steps, loss \S+, acc 0.5000", cell.stdout, re.M)
    runs = kernel.do(
        """
        import nbaccel
        def train():
            from nbaccel.base.events import Metric, emit
            for step in range(20):
                emit(Metric({"loss": 1 / (step + 1)}, step))
        run = nbaccel.launch(train, 1, start_method="inline")
        """
    )
    assert sorted(runs.panel) == ["image/png", "text/plain"]
    assert kernel.value("len(run.history.rows)") == 20


def test_plain_is_text_alone(kernel: RealKernel) -> None:
    cell: Cell = kernel.do(accelerate(trains(5), flags="--plain"))
    assert (cell.panels, cell.displays) == (0, [])
    assert re.search(r"^done in .*, 5 steps, loss \S+, acc 0.5000", cell.stdout, re.M)


@pytest.mark.slow
def test_chosen_curves_are_drawn(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(trains(30, then="time.sleep(0.05)"), flags="--plot acc,loss"))
    figures = re.findall(r"<figure[^>]*><div class=\"row fits\"><b>(\w+)", cell.frames[-2]["text/html"])
    assert figures == ["acc", "loss"]


@pytest.mark.full
@pytest.mark.slow
def test_where_nobody_watches_the_picture_comes_at_the_end_and_no_frame_before(new_kernel: Kernels) -> None:
    kernel = new_kernel(KAGGLE_KERNEL_RUN_TYPE="Batch")
    kernel.do("%load_ext nbaccel")
    cell = kernel.do(accelerate(trains(60, then="time.sleep(0.05)")))
    assert cell.sent["update_display_data"] == 0
    assert [sorted(frame) for frame in cell.frames] == [["image/png", "text/plain"]]
    assert re.search(r"^done in .*, 60 steps, loss", cell.stdout, re.M)


@pytest.mark.slow
def test_a_raw_loop_is_shown_as_a_training(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(CALLS_BACKWARD, flags="--out sums"))
    running = [frame["text/plain"] for frame in cell.frames if ": running" in frame["text/plain"]]
    assert running
    for frame in running:
        assert re.search(r"^epoch [123], batch \d/8, step \d+, ", frame, re.M), frame
    words = cell.panel["text/plain"]
    assert re.search(r"^Cell In\[\d+\]: done in .*, 24 steps$", words, re.M), words
    assert " %" not in words, "it is through"


def test_a_short_cell_sends_a_frame_its_end_and_a_picture(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("import torch\n%load_ext nbaccel\nw = torch.nn.Parameter(torch.ones(3))\nsteps = torch.optim.SGD([w])")
    loop = "for _ in range(20):\n    w.square().sum().backward()\n    steps.step()\n    steps.zero_grad()"
    kernel.do(accelerate(loop))  # loads what draws
    cell = kernel.do(accelerate(loop))
    assert "image/png" in cell.panel
    assert cell.sent["display_data"] == 1
    assert len(cell.frames) <= 3 + cell.seconds / 0.5  # a slow machine has time for more of them
    # The button's parts, complete when they are made; later the HTML of each frame, and that the button goes.
    assert cell.sent["comm_open"] <= 8
    assert cell.sent["comm_msg"] <= len(cell.frames)
