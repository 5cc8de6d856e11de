"""A loop that prepares nothing is saved, and a new kernel goes on within it as if nothing had happened."""

from __future__ import annotations

import random
import re
import time

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel, accelerate

ABOVE = """
import os, signal, torch
from pathlib import Path
%load_ext nbaccel
torch.manual_seed(0)
os.environ["KERNEL"] = str(os.getpid())

class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): return torch.randn(3) + i / 40, torch.tensor([i / 40])

def end_here(step, folder=Path(".")):
    "SIGKILL of the kernel and of all ranks, before the step that the file says."
    (folder / f"rank-{os.getpid()}").touch()
    if (folder / "end").exists() and step == int((folder / "end").read_text()):
        (folder / "end").unlink()
        pids = [int(path.name.removeprefix("rank-")) for path in folder.glob("rank-*")]
        for pid in [int(os.environ["KERNEL"]), *(pid for pid in pids if pid != os.getpid()), os.getpid()]:
            os.kill(pid, signal.SIGKILL)

model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)).to({dtype})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True)
history = []
"""

LOOP = """
step = 0
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        end_here(step)
        loss = torch.nn.functional.mse_loss(model(x.to({dtype})), y.to({dtype}))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        step += 1
    history.append(total)
"""

LEFT = (
    "[[v.hex() for t in model.state_dict().values() for v in t.double().flatten().tolist()], "
    "[v.hex() for s in optimizer.state.values() for v in s['exp_avg'].double().flatten().tolist()], "
    "[h.hex() for h in history], step, float(torch.rand(1)).hex()]"
)


def trained(kernel: RealKernel) -> list[object]:
    return list(kernel.value(LEFT))


FLAGS = "--seed 3 --checkpoint-every 2steps --checkpoint-dir {}"


def cells(dtype: str) -> tuple[str, str]:
    return ABOVE.replace("{dtype}", f"torch.{dtype}"), LOOP.replace("{dtype}", f"torch.{dtype}")


def ended(kernel: RealKernel) -> bool:
    """Wait until the kernel is dead, and all of its processes are."""
    deadline = time.monotonic() + 60
    while kernel.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
    return not kernel.is_alive and not kernel.survivors(within_s=5.0)


def killed(kernel: RealKernel, above: str, cell: str, step: int) -> None:
    """Run `cell` in a new kernel of the same folder, and end all of it before `step`; start another kernel."""
    kernel.restart()
    kernel.do(above)
    (kernel.folder / "end").write_text(str(step))
    kernel.begin(cell)
    assert ended(kernel)
    kernel.restart()
    kernel.do(above)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.timeout(420)  # three kernels, each with torch
@pytest.mark.parametrize("n", [2, 1])
def test_a_loop_that_was_killed_goes_on_in_a_new_kernel_as_if_nothing_had_happened(
    new_kernel: Kernels, start: str, n: int
) -> None:
    kernel, (above, loop) = new_kernel(), cells("float32")
    kernel.do(above)
    kernel.do(accelerate(loop, start, n, FLAGS.format("undisturbed")))
    expected = trained(kernel)
    step = random.randrange(5, 15)  # the save before the newest one is whole
    killed(kernel, above, accelerate(loop, start, n, FLAGS.format("saved")), step)
    cell = kernel.do(accelerate(loop, start, n, FLAGS.format("saved --resume")))
    said = re.search(r"^continuing from saved/checkpoint_(\d+): step (\d+)$", cell.stdout, re.M)
    assert said is not None, cell.text
    assert step - 4 <= int(said[1]) == int(said[2]) <= step
    assert "the first loss is" not in cell.text
    assert trained(kernel) == expected, f"killed before step {step}"
