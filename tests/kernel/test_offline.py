"""Nothing that we start asks the net: a notebook without internet runs its cells as any other.

Every Python process of the kernel notes whom it asks for an address, and to whom it connects outside of this machine.
What libraries in C++ do is not seen; gloo is bound to the loopback interface (`rendezvous.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.kernels import Kernels
from kernel.foreign_programs import in_one_environment
from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NOTES = """
import os, sys

def note(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else str(host)
    if not host.startswith("127.") and host not in ("localhost", "::1", "None", "", "0.0.0.0"):
        with open({path!r}, "a") as file:
            file.write(host + "\\n")

sys.addaudithook(note)
"""

TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def noting(new_kernel: Kernels, tmp_path: Path) -> RealKernel:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTES.format(path=str(tmp_path / "asked")))
    return new_kernel(PYTHONPATH=str(tmp_path / "site"))


@pytest.mark.full
@in_one_environment
def test_cells_launches_and_commands_ask_nobody_outside_of_the_machine(noting: RealKernel, tmp_path: Path) -> None:
    noting.do("%load_ext nbaccel")
    for start in ("fork", "zygote"):
        noting.do(accelerate(TRAIN, start, flags="--checkpoint-every 1h"), timeout_s=120)
    noting.do("import nbaccel; nbaccel.launch(pow, 2, (2, 5), cpu=True)")
    for command in ("doctor", "memory", "config seed=3"):
        noting.do(f"%accelerate {command}")
    asked = tmp_path / "asked"
    assert not asked.exists(), asked.read_text()
    # And the notes are taken: in forks, in ranks of the zygote, and in the notebook.
    asks = "import socket\ntry:\n    socket.getaddrinfo('nbaccel.invalid', 80)\nexcept OSError:\n    pass"
    for start in ("fork", "zygote"):
        noting.do(accelerate(asks, start))
    noting.do(asks)
    assert asked.read_text().split() == ["nbaccel.invalid"] * 5
