"""A model on the disk: ``make bench ROWS=offloading``. Memory, seconds and bytes written, beside Accelerate.

A checkpoint of 20 blocks, computed on the CPU with all blocks on the disk. Each package has a process of its own, that
first imports everything, makes the empty model, and runs a small one once; what counts is the highest memory above that
(``VmHWM``, which Linux sets back on request). The logits must be those of the plain model, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.findings import Finding, options_of, tell
from benchmarks.harness import installed

BLOCKS, WIDTH = 20, 768
_FORWARDS = 5
_ROOM = 1.2
"""Above two blocks: the one that computes, and the next one."""


class Block(nn.Module):
    """18.9 MB, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return found


class Model(nn.Module):
    """Embeddings, blocks and a head."""

    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


MAP = {"": "cpu", "blocks": "disk"}


def dispatch(package: str, folder: Path, blocks: int, width: int) -> Callable[[], nn.Module]:
    """Return what loads the model with the blocks on the disk; what it needs is imported, and an empty model made.

    package: "torch" for the plain model, in memory.
    """
    library = __import__(package)
    if package == "torch":
        return lambda: _plain(folder, blocks, width)
    with library.init_empty_weights():
        model = Model(blocks, width)
    places = {"embed": "cpu", "head": "cpu", "blocks": "disk"}

    def load() -> nn.Module:
        loaded: nn.Module = library.load_checkpoint_and_dispatch(
            model, str(folder / "model.safetensors"), device_map=places, offload_folder=folder / f"offloaded-{package}"
        )
        return loaded.eval()

    return load


def _plain(folder: Path, blocks: int, width: int) -> nn.Module:
    from safetensors.torch import load_file

    model = Model(blocks, width).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def ids() -> Tensor:
    return torch.arange(16).view(2, 8)


def write(folder: Path, blocks: int = BLOCKS, width: int = WIDTH) -> int:
    """Write the checkpoint and the plain model's logits; return the bytes of a block."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = Model(blocks, width).eval()
    save_file(model.state_dict(), folder / "model.safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in `measured`: products are rounded otherwise with more
    with torch.no_grad():
        torch.save(model(ids()), folder / "logits.pt")
    torch.set_num_threads(threads)
    return sum(parameter.nbytes for parameter in model.blocks[0].parameters())


def measured(package: str, folder: Path, blocks: int, width: int) -> dict[str, Any]:
    """In a process of its own: what loading and forwards took, with one thread, since two would wait for each other."""
    torch.set_num_threads(1)
    load = dispatch(package, folder, blocks, width)
    with torch.no_grad():
        Model(1, width)(ids())  # threads and work spaces
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    begun = time.perf_counter()
    model = load()
    loaded = time.perf_counter() - begun
    seconds = []
    wanted = torch.load(folder / "logits.pt")
    for _ in range(_FORWARDS):
        begun = time.perf_counter()
        with torch.no_grad():
            logits = model(ids())
        seconds.append(time.perf_counter() - begun)
    written = sum(path.stat().st_size for path in (folder / f"offloaded-{package}").rglob("*") if path.is_file())
    return {
        "bytes": _memory("VmHWM") - before,
        "load_s": loaded,
        "forward_s": sorted(seconds)[len(seconds) // 2],
        "written": written,
        "equal": torch.equal(logits, wanted),
    }


def _memory(kind: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def in_a_process(package: str, folder: Path, blocks: int = BLOCKS, width: int = WIDTH) -> dict[str, Any]:
    """Run `measured` in a fresh interpreter."""
    code = f"import json, pathlib, benchmarks.offloading as it; print(json.dumps(it.measured({package!r}, "
    code += f"pathlib.Path({str(folder)!r}), {blocks}, {width})))"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def findings(rounds: int) -> Iterator[Finding]:
    packages = installed(
        {"nbaccel": "nbaccel", "Accelerate": "accelerate", "the model in memory": "torch"}, {"Accelerate": "accelerate"}
    )
    for turn in range(rounds):
        with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
            block = write(Path(folder))
            found = {name: in_a_process(package, Path(folder)) for name, package in packages.items()}
        most = _ROOM * 2 * block / 1e6
        for what, key, unit, scale in (
            (f"memory above the empty model, blocks of {block / 1e6:.0f} MB", "bytes", "MB", 1e-6),
            ("written to the disk", "written", "MB", 1e-6),
            ("loading", "load_s", "s", 1),
            ("a forward", "forward_s", "s", 1),
            ("logits are the plain model's", "equal", "", 1),
        ):
            for name, values in found.items():
                ours = name == "nbaccel"
                yield Finding(
                    f"{what}, round {turn + 1}" if rounds > 1 else what,
                    name,
                    float(values[key]) * scale,
                    unit,
                    at_most={"bytes": most, "written": 0.0}.get(key) if ours else None,
                    at_least=1.0 if key == "equal" and ours else None,
                )


if __name__ == "__main__":
    options = options_of(__doc__, rounds=1)
    sys.exit(tell(findings(options.rounds), options.json))
