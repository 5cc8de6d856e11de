"""The cells of the README, as they stand there: they run, and train what plain PyTorch trains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from documents import README, blocks
from kernel.harness import RealKernel
from panel_words import panel_words

_REFERENCE = """
import copy
torch.set_default_dtype(torch.float64)
{setup}
reference = copy.deepcopy(model)
identity = id(model)
"""

# The same cell without its first line, from the same random numbers on.
_PLAIN = """
torch.set_rng_state(drawn)
trained, shown, model = model, loss.item(), reference
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
{loop}
pairs = [(mine, theirs) for mine, theirs in zip(trained.parameters(), model.parameters())]
worst = max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs)
"""

# Rank r takes batches r, r + 2, ...: one process that takes two batches at a time, in the same order, must agree.
_TWO_AT_A_TIME = """
from nbaccel.train.data.order import SharedOrder
from torch.utils.data import BatchSampler, RandomSampler

steps = torch.optim.AdamW(reference.parameters(), lr=1e-3)
data = loader.dataset
order = SharedOrder(BatchSampler(RandomSampler(data), 32, False), {seed})
for epoch in range(3):
    order.set_epoch(epoch)
    batches = list(order)
    for first, second in zip(batches[::2], batches[1::2]):
        inputs, labels = data[first + second]
        F.cross_entropy(reference(inputs), labels).backward()
        steps.step()
        steps.zero_grad()
pairs = list(zip(model.parameters(), reference.parameters()))
worst = max(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs)
"""


def readme_blocks() -> tuple[str, str, str]:
    """Of the README: the notebook's cell before, the first %%accelerate cell, and the first that prepares."""
    setup, cell, *others = [block.text for block in blocks(README, "python")]
    return setup, cell, next(block for block in others if "accelerator.prepare" in block)


@pytest.fixture
def fresh(environment, tmp_path: Path):  # type: ignore[no-untyped-def]
    kernel = RealKernel(environment, tmp_path)
    yield kernel
    kernel.close()


def test_the_readmes_first_cell_trains_as_it_does_without_its_first_line(fresh: RealKernel) -> None:
    setup, cell, _ = readme_blocks()
    magic, _, loop = cell.partition("\n")
    assert magic == "%%accelerate -n 2"
    assert "prepare" not in loop
    fresh.do("import torch")
    fresh.do(_REFERENCE.format(setup=setup))
    fresh.do("drawn = torch.get_rng_state()")
    ran = fresh.do(cell, timeout_s=100)
    assert "loader: each of 128 batches split over 2 ranks; gradients of model (1.5 k) averaged\n" in ran.stdout
    assert "brought back: model trained in place (1.5 k parameters), optimizer, loss\n" in ran.stdout
    assert fresh.value("identity == id(model)")
    printed = fresh.do(_PLAIN.format(loop=loop)).stdout
    assert fresh.value("worst") < 1e-12
    assert fresh.value("loss.item()") == pytest.approx(fresh.value("shown"), rel=1e-12)
    assert _lines(re.findall(r"epoch \d: loss .*", ran.stdout)) == printed.splitlines()


def test_what_the_readme_shows_of_its_first_cell_is_what_it_prints(fresh: RealKernel) -> None:
    setup, cell, _ = readme_blocks()
    shown = README.read_text().split(cell)[1].split("```")[2]
    fresh.do(setup)
    printed = fresh.do(cell).stdout
    assert sorted(_forms(printed)) == sorted(_forms(shown))  # a line of one rank may come before another's


def test_the_panel_in_the_readmes_picture_has_the_words_of_todays(fresh: RealKernel) -> None:
    """`make screenshot` takes the picture anew, and writes its words beside it."""
    setup, cell, _ = readme_blocks()
    fresh.do(setup)
    frames = [
        frame["text/html"] for frame in fresh.do(cell.replace("range(3)", "range(30)")).frames if "text/html" in frame
    ]
    running = [frame for frame in frames if "running</b>" in frame and "<figure" in frame and "<td>" in frame]
    words = panel_words(running[-1])
    stored = (README.parent / "notebooks" / "panel_words.txt").read_text()
    # A browser has a button for the hint that stands here.
    assert words.replace(" Stop: interrupt the kernel", "") == stored


@pytest.mark.full
def test_the_readmes_prepared_cell_trains_as_plain_pytorch_does(fresh: RealKernel) -> None:
    setup, _, cell = readme_blocks()
    assert cell.startswith("%%accelerate -n 2\n")
    fresh.do("import torch")
    fresh.do(_REFERENCE.format(setup=setup))
    ran = fresh.do(cell, timeout_s=100)
    seed = re.search(r"seed (\d+)", ran.stdout)
    assert seed is not None
    assert "brought back: model trained in place (1.5 k parameters), optimizer, loss\n" in ran.stdout
    assert fresh.value("identity == id(model)")
    fresh.do(_TWO_AT_A_TIME.format(seed=seed[1]))
    assert fresh.value("worst") < 1e-12


def test_the_readmes_first_cell_is_refused_where_that_is_wanted(fresh: RealKernel) -> None:
    setup, cell, _ = readme_blocks()
    fresh.do(setup)
    error = fresh.run(cell.replace("\n", " --strict\n", 1)).failed("NotPrepared")
    assert "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" in error.text


def _forms(output: str) -> list[str]:
    """Its lines without times, losses, speed and memory, nor tags of ranks, which depend on when a line comes."""
    untagged = _lines(re.sub(r"^\[\w+( \d)?\] ", "", output.strip(), flags=re.M).splitlines())
    without_speed = [re.sub(r", [\d,.]+ steps/s", "", line) for line in untagged]
    timed = [re.sub(r"\b\d+(\.\d)? s\b", "# s", line) for line in without_speed]
    return [re.sub(r"\d+\.\d+( to \d+\.\d+)?", "#", line) for line in timed]


def _lines(lines: Iterable[str]) -> list[str]:
    """Each once: where a rank is late, a line of all ranks comes from each."""
    return list(dict.fromkeys(lines))
