"""Programs of the notebook's side of a cluster: trainings as cells, and a script that launches on nodes."""

from __future__ import annotations

import json
import textwrap
from typing import Any

__all__ = ["ABOVE", "PREPARED", "RAW", "SCRIPT", "lines_of"]

ABOVE = """
%load_ext nbaccel
import copy, os, time
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(20, 16), torch.nn.Linear(16, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

torch.manual_seed(0)
x = torch.randn(256, 20, dtype=torch.float64)
y = (x.sum(1) > 0).long()
model = Net().double()
begun = copy.deepcopy(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
"""

RAW = """
for epoch in range({epochs}):
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        time.sleep({pause})
"""

PREPARED = """
from nbaccel import Accelerator
accelerator = Accelerator(cpu=True)
model_, optimizer_, loader_ = accelerator.prepare(model, optimizer, loader)
for epoch in accelerator.epochs({epochs}):
    for xb, yb in loader_:
        optimizer_.zero_grad()
        loss = torch.nn.functional.cross_entropy(model_(xb), yb)
        accelerator.backward(loss)
        optimizer_.step()
        time.sleep({pause})
"""

SCRIPT = f"""
import json, os, sys, time
import torch
import nbaccel
from nbaccel import Accelerator

ABOVE = {ABOVE!r}
TRAININGS = {[RAW.format(epochs=3, pause=0), PREPARED.format(epochs=3, pause=0)]!r}
""" + textwrap.dedent(
    """
    def where(factor):
        accelerator = Accelerator(cpu=True)
        total = accelerator.reduce(torch.ones(1) * accelerator.process_index, "sum")
        names = ("NODE_RANK", "SLURMD_NODENAME", "GLOO_SOCKET_IFNAME")
        return factor * int(total), {name: os.environ.get(name) for name in names}

    def fails():
        accelerator = Accelerator(cpu=True)
        if accelerator.process_index == 3:
            raise ZeroDivisionError("of rank 3")
        accelerator.wait_for_everyone()

    def difference(training, nodes):
        "Between the parameters that four ranks on nodes have trained and those of four local ones."
        from IPython.core.interactiveshell import InteractiveShell

        def do(cell):
            shell.run_cell(cell).raise_error()

        shell = InteractiveShell.instance()
        do(ABOVE)
        for name, flags in (("here", ""), ("there", f"--nodes {nodes}")):
            do("model.load_state_dict(begun); torch.manual_seed(1)")
            do(f"%%accelerate --cpu -n 4 --seed 0 --plain {flags}\\n{training}")
            do(f"{name} = copy.deepcopy(model.state_dict())")
        do("assert type(model) is Net and (here['last.bias'] != begun['last.bias']).all()")
        do("apart = max((here[name] - value).abs().max().item() for name, value in there.items())")
        return shell.user_ns["apart"]

    def told(act):
        began = time.monotonic()
        try:
            said = act()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([said, time.monotonic() - began]), flush=True)

    def refused_where_taken(address, node):
        "What a launch says while other work has the GPU of a node; and how many GPUs are free afterwards."
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        class Other:
            def has(self):
                return True

        ray.init(address=address.removeprefix("ray://"), log_to_driver=False, logging_level="error")
        (there,) = [each["NodeID"] for each in ray.nodes() if each["NodeManagerAddress"] == node]
        affinity = NodeAffinitySchedulingStrategy(there, soft=False)
        other = ray.remote(Other).options(num_gpus=1, scheduling_strategy=affinity).remote()
        assert ray.get(other.has.remote())
        told(lambda: nbaccel.launch(where, 4, (1,), cpu=True, nodes=address).values)
        deadline = time.monotonic() + 30
        while (free := ray.available_resources().get("GPU")) != 1 and time.monotonic() < deadline:
            time.sleep(0.2)
        told(lambda: free)

    if __name__ == "__main__":
        what, *addresses = sys.argv[1:]
        if what == "taken":
            refused_where_taken(*addresses)
            sys.exit()
        for address in addresses:
            launch = lambda function, *args: nbaccel.launch(function, 4, args, cpu=True, nodes=address).values
            if what == "cells":
                for training in TRAININGS:
                    told(lambda: difference(training, address))
            else:
                told(lambda: launch(where, 10))
                told(lambda: launch(where, 1))
                told(lambda: launch(fails))
    """
)
"""`script.py functions|cells ADDRESS...`: what each launch gave, or its error, and its seconds, a line of JSON each.

With "functions" two launches that meet and one whose rank 3 fails; with "cells" a raw and a prepared training; with
"taken" and the address of a node one that finds the GPU of this node taken by other work of Ray, and the free GPUs.
"""


def lines_of(text: str) -> list[Any]:
    """Return what the script has said, among what others print."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("[")]
