"""Libraries with checkpoints of their own, in cells with `--checkpoint-every`: refused before their first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbaccel.errors import FlagWithoutEffect

pytestmark = [
    *(pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(180)),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

SETUP = """
import torch
from torch.utils.data import DataLoader
"""
OF_TRAINER = """
import transformers
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 1)
    def forward(self, x):
        return {"loss": self.fc(x).square().mean()}
model = Net()
arguments = transformers.TrainingArguments("out", max_steps=3, use_cpu=True, report_to=[], save_strategy="no")
trainer = transformers.Trainer(model, arguments, train_dataset=[{"x": torch.ones(2)}] * 8)
"""
OF_LIGHTNING = """
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 1)
    def training_step(self, x, _):
        return self.fc(x).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
model = Net()
loader = DataLoader(torch.ones(8, 2), batch_size=4)
"""
FIT = """
trainer = lightning.Trainer(accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, loader)
"""
FABRIC = """
fabric = lightning.Fabric(accelerator="cpu")
fabric.launch()
inner = torch.nn.Linear(2, 1)
net, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), 0.1))
for x in fabric.setup_dataloaders(loader):
    optimizer.zero_grad()
    fabric.backward(net(x).square().mean())
    optimizer.step()
"""


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("above", "cell", "name", "instead"),
    [
        (
            OF_TRAINER,
            "trainer.train()",
            "transformers' Trainer",
            'TrainingArguments(save_strategy="steps", save_steps=',
        ),
        (OF_LIGHTNING, FIT, "Lightning's Trainer", "Trainer(callbacks=[ModelCheckpoint(...)])"),
        (OF_LIGHTNING, FABRIC, "Lightning's Fabric", "fabric.save(path, state)"),
    ],
    ids=["Trainer", "Lightning", "Fabric"],
)
def test_a_library_with_checkpoints_of_its_own_is_refused_before_its_first_step(
    notebook: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    above: str,
    cell: str,
    name: str,
    instead: str,
    n: int,
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    done = notebook.run(SETUP + above)
    assert done.error is None, done.error
    ended = notebook.run(f"%%accelerate -n {n} --cpu --checkpoint-every 1steps\n{cell}")
    assert isinstance(ended.error, FlagWithoutEffect), (ended.error, ended.stdout, ended.stderr)
    said = f"--checkpoint-every 1steps has no effect above {name}: its own arguments decide. Instead: {instead}"
    assert str(ended.error).startswith(said)
    assert not Path("nbaccel_checkpoints").exists()
