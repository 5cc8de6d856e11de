"""Sharded models and optimizers come back whole: `--out`, `pull` and returned values, from ranks of `fully_shard`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from nbaccel.errors import RankDied, ResultsMissing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of torch 2.6 runs on devices with streams only"
    ),
]

MAKES = """
import torch
class Net(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.emb = torch.nn.Embedding(rows, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in "ab")
        self.head = torch.nn.Linear(8, rows, bias=False)
        self.head.weight = self.emb.weight
        self.scale = torch.nn.Parameter(torch.ones(rows, 8))
        self.frozen = torch.nn.Parameter(torch.randn(5, 8), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h * self.scale.sum(0) + self.frozen.mean(0))
def counted(module, args, output):
    calls.append(1)
calls = []
def make(rows):
    torch.manual_seed(0)
    model = Net(rows)
    model.register_forward_hook(counted)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
"""

SHARDS = """
from torch.distributed.fsdp import fully_shard
def shard(model):
    fully_shard([model.emb, model.head])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=0.01)
def step(model, optimizer, number):
    rank = torch.distributed.get_rank()
    x = torch.randint(0, len(model.scale), (4,), generator=torch.Generator().manual_seed(10 * number + rank))
    torch.nn.functional.cross_entropy(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
def gathered(model, optimizer):
    state = optimizer.state_dict()["state"]
    return (
        {name: whole(value) for name, value in model.state_dict().items()},
        {number: {name: whole(value) for name, value in each.items()} for number, each in state.items()},
    )
"""

TRAINS = f"""{SHARDS}
optimizer = shard(model)
for number in range(2):
    step(model, optimizer, number)
weights, moments = gathered(model, optimizer)
"""


def is_as_gathered(names: dict[str, Any]) -> bool:
    """Whether model and optimizer are, bit for bit, what collectives of the ranks have put together."""
    model, optimizer = names["model"], names["optimizer"]
    weights, moments = model.state_dict(), optimizer.state_dict()["state"]
    return (
        weights.keys() == names["weights"].keys()
        and all(value.dtype == names["weights"][name].dtype for name, value in weights.items())
        and all(torch.equal(value, names["weights"][name]) for name, value in weights.items())
        and moments.keys() == names["moments"].keys()
        and all(
            torch.equal(moments[n][name], value) for n, each in names["moments"].items() for name, value in each.items()
        )
    )


def train_on(names: dict[str, Any]) -> bool:
    """Train a step in the notebook; return whether it has changed the model."""
    model, optimizer = names["model"], names["optimizer"]
    before = model.emb.weight.detach().clone()
    model(torch.arange(3)).square().mean().backward()
    optimizer.step()
    return not torch.equal(before, model.emb.weight)


@pytest.mark.parametrize(
    ("ranks", "rows", "start"), [(2, 11, "fork"), (2, 11, "zygote"), (4, 3, "fork"), (1, 4, "fork")]
)
def test_model_and_optimizer_come_back_whole_into_the_same_objects(
    notebook: Any, ranks: int, rows: int, start: str
) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make({rows})")
    names = notebook.names
    before = [id(names[name]) for name in ("model", "optimizer")] + [*map(id, names["model"].parameters())]
    cell = notebook.run(
        f"%%accelerate -n {ranks} --cpu --start {start} --out model,optimizer,weights,moments\n{TRAINS}"
    )
    assert cell.error is None
    assert "brought back: model (updated in place, " in cell.stdout
    assert "optimizer (updated in place, " in cell.stdout
    assert "not brought back" not in cell.stdout
    model, optimizer = names["model"], names["optimizer"]
    assert [id(model), id(optimizer), *map(id, model.parameters())] == before
    assert type(model) is names["Net"]
    assert type(model.blocks[0]) is torch.nn.Sequential
    assert model.head.weight is model.emb.weight
    assert not model.frozen.requires_grad
    assert is_as_gathered(names)
    assert train_on(names)


def test_new_objects_come_back_as_the_users_own_classes_and_with_the_users_hooks(notebook: Any) -> None:
    notebook.run(MAKES)
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out model,optimizer,weights,moments\nmodel, _ = make(11)\n{TRAINS}"
        "with torch.no_grad():\n    model(torch.arange(3))  # leaves the root's own parameters whole\n"
    )
    assert cell.error is None
    names = notebook.names
    names["weights"]["seen"] += 1
    assert is_as_gathered(names)
    model = names["model"]
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    hooks = [
        hook
        for module in model.modules()
        for name, table in vars(module).items()
        if name.endswith("_hooks")
        for hook in table.values()
    ]
    assert hooks == [names["counted"]]
    assert not any(key.startswith("__composable") for module in model.modules() for key in vars(module))
    assert {id(p) for g in names["optimizer"].param_groups for p in g["params"]} == set(map(id, model.parameters()))
    assert train_on(names)


def test_a_model_of_bfloat16_comes_back_bit_for_bit(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)\nmodel = model.to(torch.bfloat16)")
    assert notebook.run(f"%%accelerate -n 2 --cpu --out model,optimizer,weights,moments\n{TRAINS}").error is None
    assert notebook.names["model"].scale.dtype == torch.bfloat16
    assert is_as_gathered(notebook.names)


@pytest.mark.parametrize("rank", [0, 1])
def test_after_an_error_at_equal_steps_the_rows_are_joined(notebook: Any, rank: int) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)")
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out model,optimizer,weights,moments\n{TRAINS}"
        f"if torch.distributed.get_rank() == {rank}:\n    raise ValueError('late')\n"
        "step(model, optimizer, 2)\n"
    )
    assert isinstance(cell.error, ValueError)
    assert "brought back from the failed run: model (updated in place, " in cell.stdout
    notebook.names["weights"]["seen"] = notebook.names["model"].seen  # rank 0's forward may have begun
    assert is_as_gathered(notebook.names)
    assert train_on(notebook.names)


def test_after_a_stop_at_equal_steps_the_rows_are_joined(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)")
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out model,optimizer,weights,moments\n{TRAINS}"
        "import os, signal, time\ntorch.distributed.barrier()\n"
        f"if torch.distributed.get_rank() == 0:\n    os.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(60)\n"
    )
    assert isinstance(cell.error, KeyboardInterrupt)
    assert "brought back from the stopped run: model (updated in place, " in cell.stdout
    assert is_as_gathered(notebook.names)


def test_after_an_error_at_unequal_steps_one_sentence_says_so(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)")
    before = notebook.names["model"].emb.weight.detach().clone()
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out model,optimizer,facts\n{TRAINS}facts = [1]\n"
        "torch.nn.functional.cross_entropy(model(torch.arange(3)), torch.arange(3)).backward()\n"
        "if torch.distributed.get_rank() == 1:\n    raise ValueError('early')\n"
        "optimizer.step()\nimport time; time.sleep(60)\n"
    )
    assert isinstance(cell.error, ValueError)
    assert (
        "not brought back: model and optimizer (ranks stopped at different steps: rank 0 after 3, rank 1 after 2)"
        in cell.stdout
    )
    assert "brought back from the failed run: facts" in cell.stdout
    assert torch.equal(notebook.names["model"].emb.weight, before)


def test_a_rank_that_left_in_the_middle_of_a_step_is_named(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)")
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out model\n{TRAINS}"
        "class Broken(torch.optim.SGD):\n    def __init__(self, *a, **k): super().__init__(*a, **k)\n"
        "    @torch.no_grad()\n    def step(self, closure=None):\n"
        "        self.param_groups[0]['params'][0].zero_()\n        raise ValueError('half')\n"
        "if torch.distributed.get_rank() == 1:\n    Broken(model.parameters(), lr=1.0).step()\n"
        "import time; time.sleep(60)\n"
    )
    assert isinstance(cell.error, ValueError)
    assert "not brought back: model (rank 1 stopped in the middle of an optimizer step)" in cell.stdout


def test_the_rows_of_a_dead_rank_are_missed_in_one_sentence(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)")
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out model,facts\n{TRAINS}facts = [1]\ntorch.distributed.barrier()\n"
        "if torch.distributed.get_rank() == 1:\n    import os; os._exit(3)\n"
        "step(model, optimizer, 2)\n"
    )
    assert isinstance(cell.error, RankDied)
    assert "not brought back: model (rank 1 sent no rows of it, having ended or taken no part)" in cell.stdout
    assert notebook.names["facts"] == [1]


def test_placements_that_are_not_rows_of_all_ranks_are_refused_by_a_sentence(notebook: Any) -> None:
    cell = notebook.run(
        "%%accelerate -n 2 --cpu --out columns,rows,copies,sums\n"
        "import torch\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "values = torch.arange(12.0).reshape(3, 4)\n"
        "columns = distribute_tensor(values, mesh, [Shard(1)])\n"
        "rows = {'deep': [distribute_tensor(values, mesh, [Shard(0)])]}\n"
        "copies = distribute_tensor(values, mesh, [Replicate()])\n"
        "sums = torch.nn.Linear(2, 2)\n"
        "sums.part = DTensor.from_local(values, mesh, [Partial()])\n"
    )
    assert isinstance(cell.error, ResultsMissing)
    assert (
        "columns (a tensor of it cannot be joined: it is placed as Shard(dim=1), and only rows, Shard(dim=0), are "
        "joined; send what full_tensor() returns in every rank)" in str(cell.error)
    )
    assert "sums (a tensor of it cannot be joined: it is placed as Partial(sum), and only rows" in str(cell.error)
    expected = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(notebook.names["rows"]["deep"][0], expected)
    assert torch.equal(notebook.names["copies"], expected)


def test_a_name_that_only_one_rank_binds_is_not_joined(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)")
    cell = notebook.run(
        f"%%accelerate -n 2 --cpu --out best\n{TRAINS}if torch.distributed.get_rank() == 0:\n    best = model\n"
    )
    assert isinstance(cell.error, ResultsMissing)
    assert "best (rank 1 has no rows for best where the others have some" in str(cell.error)


def test_a_cell_without_out_leaves_a_sharded_model_of_the_notebook_as_it_was_and_says_how(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)\nlosses = []")
    names = notebook.names
    model = names["model"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        cell = notebook.run(
            f"%%accelerate -n 2 --cpu\n{TRAINS}losses.append(1)\n"
            "with torch.no_grad():\n    model(torch.arange(3))  # leaves the root's own parameters whole\n"
        )
        assert cell.error is None
        assert "; not brought back: model, optimizer (the ranks have it in shards, which --out joins)\n" in cell.stdout
    assert names["losses"] == [1, 1]
    assert names["model"] is model
    assert type(model) is names["Net"]
    assert type(model.blocks[0]) is torch.nn.Sequential
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.arange(3)).sum().backward()


def test_pull_asks_the_other_ranks_for_their_rows(notebook: Any) -> None:
    notebook.run(f"{MAKES}\nmodel, optimizer = make(11)")
    names = notebook.names
    assert notebook.run("%accelerate start -n 2 --cpu").error is None
    try:
        assert notebook.run(f"%%accelerate\n{TRAINS}").error is None
        model = names["model"]
        cell = notebook.run("%accelerate pull model optimizer weights moments")
        assert cell.error is None
        assert "brought back: model (updated in place, " in cell.stdout
        assert names["model"] is model
        assert is_as_gathered(names)
        assert train_on(names)
        cell = notebook.run(
            "%%accelerate --out model,optimizer,weights,moments\nstep(model, optimizer, 2)\n"
            "weights, moments = gathered(model, optimizer)"
        )
        assert cell.error is None
        assert is_as_gathered(names)
        cell = notebook.run(
            "%%accelerate\nif torch.distributed.get_rank() == 0:\n"
            "    for each in model.parameters(): each.grad = torch.zeros_like(each)\n    optimizer.step()\n"
            "raise ValueError('apart')"
        )
        assert isinstance(cell.error, ValueError)
        cell = notebook.run("%accelerate pull model")
        assert isinstance(cell.error, ResultsMissing)
        assert "model (ranks stopped at different steps: rank 0 after 4, rank 1 after 3)" in str(cell.error)
    finally:
        notebook.session.close()
