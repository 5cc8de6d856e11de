"""The cells of the pages in docs/, and those of the README for libraries: they run as they stand there."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from documents import PAGES, README, Block, blocks
from environments import NEWEST
from kernel.harness import RealKernel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NOT_ONE_AFTER_THE_OTHER = {"testing", "libraries"}
"""Pages with tests of their own."""

PAGES_WITH_CELLS = [
    page
    for page in PAGES
    if page.parent.name == "docs" and page.stem not in NOT_ONE_AFTER_THE_OTHER and blocks(page, "python")
]
KAGGLE, WITH_LIBRARIES = [README.parent / "docs" / f"{name}.md" for name in ("kaggle", "libraries")]

SHORTER = ("--speed 3min", "--speed 20s")
"""A search for speed takes as long as it is told."""

SETUP = blocks(README, "python")[0].text
"""What a reader of any of these pages has run before."""

LIBRARIES = {
    "transformers": """
        from transformers import LlamaConfig, LlamaForCausalLM
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        dataset = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 16))]
    """,
    "trl": """
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        words = {word: index for index, word in enumerate(["[UNK]", "[PAD]", "</s>", "a", "b", "c"])}
        plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        plain.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=plain, unk_token="[UNK]", pad_token="[PAD]", eos_token="</s>"
        )
        texts = Dataset.from_dict({"text": ["a b c", "b c a"] * 16})
    """,
    "peft": "",
    "lightning": """
        import lightning
        class Classifier(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(20, 2)
            def training_step(self, batch, _):
                return F.cross_entropy(self.layer(batch[0]), batch[1])
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
        module = Classifier()
    """,
    "timm": """
        pictures = TensorDataset(torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
        loader = DataLoader(pictures, batch_size=4)
    """,
}
"""What the notebook has before the cell of each library in docs/libraries.md, in their order there."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    kernel = RealKernel(NEWEST, tmp_path_factory.mktemp("pages"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    try:
        kernel.do(f"{SETUP}\nimport nbaccel; nbaccel.launch(int, 1)")  # the reaper runs from here on
        yield kernel
    finally:
        kernel.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("page", PAGES_WITH_CELLS, ids=lambda page: page.name)
def test_the_cells_of_a_page_run_one_after_the_other(kernel: RealKernel, page: Path) -> None:
    kernel.do(SETUP)
    for block in blocks(page, "python"):
        cell = kernel.run(block.text.replace(*SHORTER), timeout_s=120)
        assert cell.status == "ok", f"{block}: {cell.error and cell.error.text}\n{cell.text}"


@pytest.mark.full
def test_the_page_on_kaggle_ends_in_a_resumed_session(tmp_path: Path) -> None:
    """Two kernels, as two sessions: the second has the output of the first as its input."""
    seed, train = [block.text for block in blocks(KAGGLE, "python")]
    outputs, inputs = tmp_path / "nbaccel_checkpoints", tmp_path / "input"
    for resume, begins in [("--resume", "nothing to resume in"), (f"--resume {inputs}", f"continuing from {inputs}")]:
        kernel = RealKernel(NEWEST, tmp_path)
        try:
            kernel.do(SETUP.replace("x = ", f"{seed}x = ", 1))
            session = train.replace("--resume", resume).replace("11h30m", "2s").replace("range(2)", "range(99)")
            assert begins in kernel.run(session, timeout_s=90).succeeded().text
        finally:
            kernel.close()
        if not inputs.exists():
            outputs.rename(inputs)


@pytest.mark.full
def test_cells_with_libraries_train_what_the_notebook_has(kernel: RealKernel) -> None:
    """Those of packages that the tests have; the others run where somebody has installed them."""
    cells = {_library(block): block for block in blocks(WITH_LIBRARIES, "python")}
    assert list(cells) == list(LIBRARIES), "in the order in which they stand there"
    kernel.do(SETUP)
    for name, block in cells.items():
        if importlib.util.find_spec(name) is None:
            continue
        kernel.do(LIBRARIES[name], timeout_s=90)
        cell = kernel.run(block.text, timeout_s=90)
        assert cell.status == "ok", f"{block}: {cell.error and cell.error.text}\n{cell.text}"
        assert re.search(r"brought back: .*\([\d.]+( [kM])? parameters\)", cell.stdout), f"{block}\n{cell.text}"


def test_the_readmes_cells_with_libraries_stand_on_their_page() -> None:
    section = README.read_text().partition("## With a library")[2].partition("\n## ")[0]
    shown = {block.text for block in blocks(README, "python") if block.text in section}
    assert shown
    assert shown <= {block.text for block in blocks(WITH_LIBRARIES, "python")}


def _library(block: Block) -> str:
    return re.findall(r"^(?:from|import) (\w+)", block.text, re.M)[0]
