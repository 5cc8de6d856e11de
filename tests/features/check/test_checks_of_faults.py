"""Faults that people report of trainings that had run for long, each in a small cell: a check names the line.

The links lead to such reports. Cells are written here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from environments import NEWEST
from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETUP = """
import json
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

X = torch.randn(1000, 20)
Y = (X.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(X, Y), 32, shuffle=True)
test_loader = DataLoader(TensorDataset(X[:101], Y[:101]), 32)

class Reader(nn.Module):
    def __init__(self, positions=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, 16), nn.Embedding(positions, 16)
        self.cells = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 2)
    def forward(self, tokens, hidden=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.cells(x, hidden)[0][:, -1])

class Texts(Dataset):
    def __len__(self):
        return 500
    def __getitem__(self, index):
        return torch.ones(90 if index == 123 else 10 + index % 20, dtype=torch.long)

def padded(texts):
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)

def fit(epochs):
    for epoch in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss
"""

FAULTS = {
    # github.com/pytorch/pytorch/issues/7716
    "a last batch of one sample": (
        """
        model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        for epoch in range(50):
            for x, y in DataLoader(TensorDataset(X[:961], Y[:961]), 32, shuffle=True):
                F.cross_entropy(model(x), y).backward()  # here
        """,
        "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 8])",
    ),
    # github.com/udacity/deep-learning-v2-pytorch/pull/398
    "a hidden state for whole batches": (
        """
        reader = Reader()
        for tokens in DataLoader(torch.ones(1010, 12, dtype=torch.long), 32):
            hidden = torch.zeros(1, 32, 16), torch.zeros(1, 32, 16)
            reader(tokens, hidden)  # here
        """,
        "RuntimeError: Expected hidden[0] size (1, ",
    ),
    # github.com/liaoyuhua/GPT-TS/issues/9
    "a folder that is not there": (
        """
        fit(100)
        torch.save(model.state_dict(), 'checkpoints/best.pt')  # here
        """,
        "RuntimeError: Parent directory checkpoints does not exist.",
    ),
    # github.com/junyanz/pytorch-CycleGAN-and-pix2pix/issues/495
    "a scheduler that wants a metric": (
        """
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for epoch in range(30):
            fit(1)
            scheduler.step()  # here
        """,
        "missing 1 required positional argument: 'metrics'",
    ),
    # github.com/hiyouga/LlamaFactory/issues/2613
    "tensors in a JSON file at the end": (
        """
        losses = [fit(1).detach() for epoch in range(20)]
        with open('losses.json', 'w') as file:
            json.dump(losses, file)  # here
        """,
        "TypeError: Object of type Tensor is not JSON serializable",
    ),
    # github.com/mingcv/DSRNet/issues/12
    "a checkpoint that holds more than the model": (
        """
        fit(100)
        torch.save({'model': model.state_dict(), 'epoch': 100}, 'last.pt')
        best = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
        best.load_state_dict(torch.load('last.pt'))  # here
        """,
        "RuntimeError: Error(s) in loading state_dict for Sequential:",
    ),
    # discuss.pytorch.org: "Can't call numpy() on Tensor that requires grad"
    "gradients of what is to be plotted": (
        """
        losses = [fit(1) for epoch in range(20)]
        curve = np.array([loss.numpy() for loss in losses])  # here
        """,
        "RuntimeError: Can't call numpy() on Tensor that requires grad.",
    ),
    # github.com/huggingface/transformers, "index out of range in self": texts longer than the positions of a model
    "one text that is longer than the model can read": (
        """
        reader, texts = accelerator.prepare(Reader(), DataLoader(Texts(), 16, shuffle=True, collate_fn=padded))
        for epoch in range(3):
            for tokens in texts:
                accelerator.backward(reader(tokens).mean())  # here
        """,
        "IndexError: index out of range in self",
    ),
    # github.com/huggingface/accelerate/issues/1326, and 235
    "a gather of unequal lengths": (
        """
        texts = accelerator.prepare(DataLoader(Texts(), 16, collate_fn=padded))
        for tokens in texts:
            accelerator.gather(tokens)  # here
        """,
        "",
    ),
    # github.com/yizhiwang96/deepvecfont/issues/3
    "a lambda for loader workers that start anew": (
        """
        fit(100)
        def evaluation(data):
            return DataLoader(data, 32, num_workers=1, multiprocessing_context='spawn', collate_fn=lambda rows: rows)
        for batch in evaluation(X):  # here
            pass
        """,
        "local object 'evaluation.<locals>.<lambda>'",
    ),
    # an evaluation whose loader drops the only batch it has
    "a loss of no batch": (
        """
        fit(100)
        def evaluate(batches):
            for x, y in batches:
                found = F.cross_entropy(model(x), y)
            return found  # here
        evaluate(DataLoader(TensorDataset(X[:20], Y[:20]), 32, drop_last=True))
        """,
        "UnboundLocalError: cannot access local variable 'found'",
    ),
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    kernel = RealKernel(NEWEST, tmp_path_factory.mktemp("faults"))
    try:
        kernel.do(f"%load_ext nbaccel\n{SETUP}")
        kernel.do("import nbaccel; nbaccel.launch(int, 1)")  # the reaper runs from here on
        yield kernel
    finally:
        kernel.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_line_of_a_fault_is_named(kernel: RealKernel, fault: str) -> None:
    body, sentence = FAULTS[fault]
    lines = textwrap.dedent(body).strip().splitlines()
    (at,) = [number for number, line in enumerate(lines, 2) if line.endswith("# here")]
    cell = kernel.run(accelerate(body, flags="--check")).succeeded()
    said = str(cell.displays[0]["text/plain"])
    red = [line for line in said.splitlines() if line.startswith(f"red: line {at}")]
    assert red, said
    assert sentence in said
