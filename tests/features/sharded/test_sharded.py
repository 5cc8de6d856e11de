"""Models that are sharded over the ranks: what programs do that torch's ``fully_shard`` alone does not bear."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nbaccel import Accelerator
from nbaccel.errors import CannotSave, CollectiveMismatch, NotPrepared
from nbaccel.features.sharded.groups import GroupPolicy, choose_groups
from nbaccel.local_sgd import LocalSGD
from nbaccel.testing import run_ranks
from nbaccel.utils import FullyShardedDataParallelPlugin, find_executable_batch_size

BATCH = 8
X = torch.ones(4, 3)


class Block(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim: int = 6, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plugin(**fields: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(**fields)


def _batches(world: int, rank: int, steps: int = 3) -> list[torch.Tensor]:
    words = torch.randint(0, 11, (steps, BATCH, 4), generator=torch.Generator().manual_seed(1))
    own = BATCH // world
    return [step[rank * own : (rank + 1) * own] for step in words]


def _fit(
    model: nn.Module, optimizer: Any, batches: list[torch.Tensor], backward: Callable[[torch.Tensor], None]
) -> None:
    for words in batches:
        backward(F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()


def _alone(make: Callable[[], nn.Module], steps: int = 3) -> dict[str, torch.Tensor]:
    """What plain PyTorch trains in one process."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    _fit(model, optimizer, _batches(1, 0, steps), lambda loss: loss.backward())
    return {name: value.detach() for name, value in model.state_dict().items()}


def _sharded(make: Callable[[], nn.Module], ranks: int = 2, steps: int = 3, **fields: Any) -> dict[str, torch.Tensor]:
    """What the same program trains, sharded over `ranks`."""

    def train() -> dict[str, torch.Tensor]:
        accelerator = Accelerator(strategy="fsdp", fsdp_plugin=plugin(**fields))
        torch.manual_seed(3 + accelerator.process_index)
        model = make()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        _fit(model, optimizer, _batches(ranks, accelerator.process_index, steps), accelerator.backward)
        assert all(hasattr(parameter, "to_local") for parameter in model.parameters())
        return accelerator.get_state_dict(model)

    return run_ranks(ranks, train)[0]


def _furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def _tied() -> nn.Module:
    net = Net()
    net.head.weight = net.embed.weight
    return net


def _tied_across_blocks() -> nn.Module:
    net = Net()
    net.blocks[2].up.weight = net.blocks[0].up.weight  # type: ignore[union-attr]
    net.blocks[1].norm.weight = net.blocks[0].norm.weight  # type: ignore[union-attr]
    return net


def _half_of_one_block() -> nn.Module:
    net = Net()
    net.blocks[1].down.double()  # type: ignore[union-attr]
    net.blocks[1].down.register_forward_pre_hook(lambda layer, inputs: (inputs[0].double(),))  # type: ignore[union-attr]
    net.blocks[1].down.register_forward_hook(lambda layer, inputs, output: output.float())  # type: ignore[union-attr]
    return net


def _frozen_embedding() -> nn.Module:
    net = Net()
    net.embed.requires_grad_(False)
    net.blocks[1].requires_grad_(False)  # type: ignore[union-attr]
    return net


@pytest.mark.parametrize("make", [_tied, _tied_across_blocks, _half_of_one_block, _frozen_embedding])
def test_unusual_parameters_train_like_in_one_process(make: Callable[[], nn.Module]) -> None:
    assert _furthest(_alone(make), _sharded(make)) < 1e-5


def _in_place() -> nn.Module:
    net = Net()
    net.blocks = nn.ModuleList(  # type: ignore[assignment]
        part for _ in range(3) for part in (nn.Linear(6, 6), nn.ReLU(inplace=True))
    )
    return net


def test_an_operation_in_place_behind_a_layer_drops_no_gradient() -> None:
    assert _furthest(_alone(_in_place), _sharded(_in_place)) < 1e-5


@pytest.mark.parametrize("ranks", [3, 4])
def test_tied_rows_that_no_number_of_ranks_divides_are_all_trained(ranks: int) -> None:
    global BATCH
    before, BATCH = BATCH, 12
    try:
        assert _furthest(_alone(_tied), _sharded(_tied, ranks)) < 1e-5
    finally:
        BATCH = before


@pytest.mark.parametrize(
    "fields",
    [
        {"reshard_after_forward": False},
        {"auto_wrap_policy": "no_wrap"},
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
        {"auto_wrap_policy": lambda module: isinstance(module, nn.Linear)},
        {"activation_checkpointing": True},
        {"cpu_offload": True},
    ],
    ids=["zero2", "root alone", "classes", "size", "function", "recomputed", "offloaded"],
)
def test_what_the_plugin_chooses_changes_no_number(fields: dict[str, Any]) -> None:
    assert _furthest(_alone(Net), _sharded(Net, **fields)) < 1e-5


def test_ranks_without_weights_get_those_of_rank_0() -> None:
    def make() -> nn.Module:
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_rank():
            with torch.device("meta"):
                return Net()
        return Net()

    assert _furthest(_alone(Net), _sharded(make)) < 1e-5


def test_weights_that_nobody_has_are_refused_by_name() -> None:
    def prepare() -> str:
        accelerator = Accelerator(strategy="fsdp")
        with torch.device("meta"):
            net = Net()
        try:
            accelerator.prepare(net)
        except ValueError as error:
            return str(error)
        return "prepared"

    assert all("embed.weight of Net is on the meta device in rank 0" in told for told in run_ranks(2, prepare))


def test_ranks_with_other_models_are_refused() -> None:
    def prepare() -> str:
        accelerator = Accelerator(strategy="fsdp")
        try:
            accelerator.prepare(nn.Sequential(nn.Linear(2, 2 + accelerator.process_index), nn.Linear(3, 1)))
        except CollectiveMismatch as error:
            return str(error)
        return "prepared"

    assert all("prepare Sequential of 4 parameters" in told for told in run_ranks(2, prepare))


def test_quantised_weights_are_refused_with_two_ways_out() -> None:
    class Params4bit(nn.Parameter):
        pass

    def prepare() -> str:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        net[0].weight = Params4bit(torch.ones(2, 2), requires_grad=False)
        with pytest.raises(ValueError, match=r"0.weight is quantised \(Params4bit\).*strategy='ddp'.*ignored_modules"):
            Accelerator(strategy="fsdp").prepare(net)
        return "refused"

    assert run_ranks(2, prepare) == ["refused", "refused"]


def test_trained_half_precision_is_kept_in_fp32_and_said_once() -> None:
    def prepare() -> tuple[list[str], int]:
        accelerator = Accelerator(strategy="fsdp", mixed_precision="bf16")
        net = Net().bfloat16()
        net.embed.requires_grad_(False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = accelerator.prepare(net)
        loss = model(torch.ones(2, 3, dtype=torch.long)).sum()
        accelerator.backward(loss)
        dtypes = [str(model.embed.weight.dtype), str(model.head.weight.dtype), str(loss.dtype)]
        return dtypes, sum("were in half precision" in str(one.message) for one in said)

    dtypes = ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert run_ranks(2, prepare) == [(dtypes, 1), (dtypes, 0)]


@pytest.mark.parametrize("is_clipped", [False, True])
def test_an_infinite_row_in_one_rank_skips_the_fp16_step_in_all_of_them(is_clipped: bool) -> None:
    def train() -> tuple[list[bool], list[float], list[float]]:
        accelerator = Accelerator(strategy="fsdp", mixed_precision="fp16")
        torch.manual_seed(3)
        model = nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert accelerator.scaler is not None
        skipped, scales, weights = [], [], []
        for step in range(3):
            accelerator.backward(model(torch.ones(2, 4)).sum() / 64)  # times the first scale, 65536, it fits fp16
            if step == 1 and accelerator.process_index == 1:  # rows that only this rank has
                model.weight.grad.to_local().fill_(math.inf)
            if is_clipped:
                accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
            scales.append(accelerator.scaler.get_scale())
            weights.append(float(model.weight.detach().full_tensor().sum()))
        return skipped, scales, weights

    first, second = run_ranks(2, train)
    assert first == second
    skipped, _, weights = first
    assert skipped == [False, True, False]
    assert weights[0] == weights[1] != weights[2]
    assert all(map(math.isfinite, weights))


def test_a_compiled_model_trains_the_same() -> None:
    def train() -> dict[str, torch.Tensor]:
        accelerator = Accelerator(strategy="fsdp", dynamo_backend="eager")
        torch.manual_seed(3)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _fit(model, optimizer, _batches(2, accelerator.process_index), accelerator.backward)
        return accelerator.get_state_dict(model)

    assert _furthest(_alone(Net), run_ranks(2, train, timeout_s=120)[0]) < 1e-5


@pytest.mark.parametrize("is_of_model", [False, True], ids=["accelerator", "model"])
def test_gradients_stay_in_their_rank_under_no_sync_and_are_reduced_by_the_next_backward(is_of_model: bool) -> None:
    """The model's own method is that of DDP and of FSDP1, which programs call."""

    def train() -> list[torch.Tensor]:
        accelerator = Accelerator(strategy="fsdp")
        torch.manual_seed(3)
        model = accelerator.prepare(nn.Linear(3, 2))
        x = torch.full((1, 3), 1.0 + accelerator.process_index)
        with model.no_sync() if is_of_model else accelerator.no_sync(model):
            accelerator.backward(model(x).sum())
            held = model.weight.grad is None
            with model.no_sync() if is_of_model else accelerator.no_sync(model):
                accelerator.backward(model(x).sum())
            accelerator.backward(model(x).sum())
            held = held and model.weight.grad is None
        accelerator.backward(model(x).sum())
        return [torch.tensor(held), model.weight.grad.full_tensor()]

    for held, gradient in run_ranks(2, train):
        assert held
        assert torch.equal(gradient, torch.full((2, 3), 4 * 1.5))


def test_a_model_goes_from_ddp_to_fsdp_and_back_with_its_optimizer() -> None:
    def train() -> tuple[dict[str, torch.Tensor], list[str], bool]:
        torch.manual_seed(3)
        net = _tied()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
        kinds = []
        for number, strategy in enumerate(("ddp", "fsdp", "ddp", "fsdp")):
            accelerator = Accelerator(strategy=strategy)
            model, prepared = accelerator.prepare(net, optimizer)
            batches = _batches(2, accelerator.process_index, 4)[number : number + 1]
            _fit(model, prepared, batches, accelerator.backward)
            kinds.append(type(net).__name__)
            accelerator.destroy_process_group()
        return net.state_dict(), kinds, net.head.weight is net.embed.weight  # type: ignore[union-attr]

    wanted = _alone(_tied, 4)
    for got, kinds, is_tied in run_ranks(2, train):
        assert _furthest(wanted, got) < 1e-5
        assert kinds == ["Net", "FSDPNet", "Net", "FSDPNet"]
        assert is_tied


def test_a_model_that_is_whole_again_is_not_trained_by_each_rank_for_itself() -> None:
    def train() -> str:
        accelerator = Accelerator(strategy="fsdp")
        net = nn.Linear(3, 1)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(model(X).sum())
        accelerator.destroy_process_group()
        with pytest.raises(NotPrepared, match="the model is not prepared"):
            accelerator.backward(model(X).sum())
        model = accelerator.prepare(model)
        accelerator.backward(model(X).sum())
        optimizer.step()
        return type(model).__name__

    assert run_ranks(2, train) == ["FSDPLinear", "FSDPLinear"]


def test_an_optimizer_that_is_kept_holds_rows_only() -> None:
    def prepare() -> tuple[int, int]:
        accelerator = Accelerator(strategy="fsdp")
        net = Net()
        old = list(net.parameters())
        accelerator.prepare(net)
        return sum(parameter.numel() for parameter in old), sum(p.to_local().numel() for p in net.parameters())

    whole = sum(parameter.numel() for parameter in Net().parameters())
    for of_old, of_rows in run_ranks(2, prepare):
        assert of_old == 0
        assert of_rows < 0.6 * whole


def test_trained_modules_cannot_be_left_out() -> None:
    def prepare() -> str:
        accelerator = Accelerator(strategy="fsdp", fsdp_plugin=plugin(ignored_modules="blocks.0"))
        with pytest.raises(ValueError, match=r"parameters that are trained \(blocks.0.norm.weight, .*…\)"):
            accelerator.prepare(Net())
        return "refused"

    assert run_ranks(2, prepare) == ["refused", "refused"]


def test_a_rank_cannot_be_done_earlier() -> None:
    def join() -> str:
        accelerator = Accelerator(strategy="fsdp")
        model = accelerator.prepare(Net())
        with pytest.raises(ValueError, match="join_uneven_inputs: FSDPNet is sharded"):
            accelerator.join_uneven_inputs([model]).__enter__()
        return "refused"

    assert run_ranks(2, join) == ["refused", "refused"]


def test_a_function_that_runs_out_of_memory_is_called_again_with_a_smaller_batch() -> None:
    def train() -> tuple[list[int], int]:
        accelerator = Accelerator(strategy="fsdp")
        tried = []

        @find_executable_batch_size(starting_batch_size=8)
        def attempt(batch_size: int) -> int:
            tried.append(batch_size)
            model, optimizer = accelerator.prepare(net := Net(), torch.optim.AdamW(net.parameters()))
            for step in range(3):
                if batch_size > 2 and accelerator.is_last_process and step == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                _fit(model, optimizer, [torch.ones(batch_size, 4, dtype=torch.long)], accelerator.backward)
            return batch_size

        return tried, attempt()

    assert run_ranks(2, train) == [([8, 4, 2], 2)] * 2


def _go_on(ranks: int, strategy: str, folder: Path, first: int, steps: int) -> dict[str, torch.Tensor]:
    """Train `steps` batches, from `first` on, after the checkpoint in `folder` if there is one; save there again."""

    def train() -> dict[str, torch.Tensor]:
        accelerator = Accelerator(strategy=strategy)
        torch.manual_seed(3 + first)
        net = _tied()
        model, optimizer = accelerator.prepare(net, torch.optim.Adagrad(net.parameters(), lr=0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of new ranks, whose random numbers begin anew
            if first:
                accelerator.load_state(folder)
        batches = _batches(ranks, accelerator.process_index, first + steps)[first:]
        _fit(model, optimizer, batches, accelerator.backward)
        accelerator.save_state(folder)
        return accelerator.get_state_dict(model)

    return run_ranks(ranks, train)[0]


def test_a_training_goes_on_in_other_numbers_of_ranks_sharded_or_not(tmp_path: Path) -> None:
    for first, (ranks, strategy) in enumerate([(2, "fsdp"), (1, "auto"), (4, "fsdp"), (2, "ddp"), (2, "fsdp")]):
        got = _go_on(ranks, strategy, tmp_path / "parts", first, 1)
    assert _furthest(_go_on(1, "auto", tmp_path / "alone", 0, 5), got) < 1e-5


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (lambda accelerator, model: LocalSGD(accelerator, model, 2), "LocalSGD: FSDPLinear is sharded"),
        (lambda accelerator, model: accelerator.save(model.state_dict(), "file"), "accelerator.save was given a shard"),
        (
            lambda accelerator, model: torch.save(model.state_dict(), io.BytesIO()),
            "torch.save was given a sharded tensor",
        ),
    ],
    ids=["LocalSGD", "save", "torch.save"],
)
def test_what_cannot_be_done_with_shards_is_refused_on_every_rank(
    call: Callable[[Accelerator, nn.Module], Any], refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused() -> bool:
        accelerator = Accelerator(strategy="fsdp")
        net = nn.Linear(3, 2)
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises((NotImplementedError, CannotSave), match=refusal):
            call(accelerator, model)
        return not list(tmp_path.iterdir())

    assert run_ranks(2, refused) == [True, True]


def _language_models(strategy: str) -> list[tuple[dict[str, torch.Tensor], list[list[int]]]]:
    """Train a tied model of transformers, and one with adapters of peft; generate with both, other lengths by rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = Accelerator(strategy=strategy)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    results = []
    for with_adapters in (False, True):
        torch.manual_seed(0)
        net: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, eos_token_id=None))
        if with_adapters:
            net = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        optimizer = torch.optim.SGD([weight for weight in net.parameters() if weight.requires_grad], lr=0.1)
        model, optimizer = accelerator.prepare(net, optimizer)
        for words in _batches(ranks, rank):
            accelerator.backward(model(input_ids=words, labels=words).loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        told = net.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=4 + 2 * rank, do_sample=False)
        results.append((accelerator.get_state_dict(model), told.tolist()))
    return results


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries, about each other
def test_models_of_transformers_and_peft_train_and_generate_other_lengths_on_each_rank() -> None:
    alone = run_ranks(1, _language_models, "auto", timeout_s=120)[0]
    first, second = run_ranks(2, _language_models, "fsdp", timeout_s=120)
    for (wanted, words), (got, shorter), (_, longer) in zip(alone, first, second, strict=True):
        assert _furthest(wanted, got) < 1e-5
        assert shorter == words
        assert longer[0][: len(words[0])] == words[0]
        assert len(longer[0]) == len(words[0]) + 2


NUMBERS: list[Callable[[nn.Module], Any]] = [
    lambda net: net[0].weight.norm().item(),
    lambda net: (net[0].weight ** 2).sum().item(),
    lambda net: float(net[0].weight.detach().abs().max()),
    lambda net: net[0].weight.min().item(),
    lambda net: int(100 * net[0].weight.data.sum()),
    lambda net: bool(torch.isnan(net[2].weight).any()),
    lambda net: net[0].weight[-1, 0].item(),
    lambda net: net[2].bias.item(),  # one element, which one rank has
    lambda net: net[0].weight.grad.norm().item(),
    lambda net: math.sqrt(sum(p.grad.norm().item() ** 2 for p in net.parameters())),
    lambda net: sum(p.norm() for p in net.parameters()).item(),
    lambda net: f"{net[0].weight.norm():.6f}",
]


def _read(strategy: str) -> list[float]:
    accelerator = Accelerator(strategy=strategy)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model = accelerator.prepare(net)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    with torch.no_grad():
        net[2].weight[0, 0] = torch.nan
    return [float(read(net)) for read in NUMBERS]


def test_a_number_that_is_read_of_a_sharded_tensor_is_that_of_the_whole_one_on_every_rank() -> None:
    whole = run_ranks(1, _read, "auto")[0]
    for got in run_ranks(2, _read, "fsdp"):
        assert got == pytest.approx(whole, abs=1e-5, nan_ok=True)


def _other_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).state_dict()


def _by_hand_in_steps(accelerator: Accelerator, model: nn.Module, net: nn.Module, habit: str) -> None:
    if habit == "draws like":
        with torch.no_grad():
            net[0].weight += 0.1 * torch.randn_like(net[0].weight)
            net[0].bias.add_(torch.rand_like(net[0].bias.data), alpha=0.1)
            net[2].weight.mul_(torch.bernoulli(torch.full_like(net[2].weight, 0.5)))
            net[2].weight.add_(torch.empty_like(net[2].weight).bernoulli_(0.5)).add_(F.dropout(net[2].weight, 0.3))
            nn.init.eye_(net[2].weight)
            net[0].weight[1:3] *= torch.randint_like(net[0].weight[1:3], 3)
    elif habit == "loads":
        model.load_state_dict(_other_weights())
    elif habit == "loads a part":
        net[0].load_state_dict({"weight": _other_weights()["0.weight"]}, strict=False)
        net[2].bias.data.copy_(torch.tensor(0.25))
    elif habit == "averages":
        average = {name: value.clone() for name, value in model.state_dict().items()}
        kept = torch.empty(5, 4)
        kept.copy_(net[0].weight.data)  # a whole tensor of every rank's own
        model.load_state_dict(_other_weights())
        for name, value in model.state_dict().items():
            average[name].mul_(0.9).add_(value, alpha=0.1)
        average["0.weight"] += kept.to(average["0.bias"].dtype).mean().item()
        model.load_state_dict(average)
    elif habit == "sharpness":
        kept = [parameter.data.clone() for parameter in net.parameters()]
        accelerator.backward(model(torch.ones(2, 4)).sum())
        norm = torch.norm(torch.stack([parameter.grad.norm(p=2) for parameter in net.parameters()]), p=2)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(parameter.grad * (0.05 / (norm + 1e-12)))
                parameter.grad.div_(parameter.grad.norm() + 1e-6).add_(parameter, alpha=0.01)
        for parameter, before in zip(net.parameters(), kept, strict=True):
            parameter.data = before


def _by_hand(strategy: str, habit: str) -> list[torch.Tensor]:
    """Train one step after or with something that programs do to parameters by hand."""
    accelerator = Accelerator(strategy=strategy)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model = accelerator.prepare(net)
    torch.manual_seed(5)  # equal on the ranks, as set_seed leaves it
    if habit == "draws anew":
        for parameter in net.parameters():
            parameter.detach().normal_(0.0, 0.1) if parameter.ndim < 2 else nn.init.xavier_uniform_(parameter)
    elif habit == "whole values":
        net[0].weight.data = torch.arange(20.0).reshape(5, 4) / 20
        nn.utils.vector_to_parameters(torch.full((6,), 0.2), net[2].parameters())
    elif habit == "elements":
        with torch.no_grad():
            net[0].weight[3, 1:3] = torch.tensor([0.5, 0.25])
            net[0].bias[1:] = net[0].bias[0]
        net[2].weight.data[net[2].weight.data.abs() < 0.2] = 0.0  # as pruning does
    else:
        _by_hand_in_steps(accelerator, model, net, habit)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    for parameter in net.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad
    return list(accelerator.get_state_dict(model).values())


HABITS = [
    "draws anew",
    "draws like",
    "whole values",
    "elements",
    "loads",
    "loads a part",
    "averages",
    "sharpness",
    "steps",
]


@pytest.mark.parametrize("habit", HABITS)
def test_what_is_done_to_parameters_by_hand_is_done_to_whole_ones(habit: str) -> None:
    wanted, got = run_ranks(1, _by_hand, "auto", habit)[0], run_ranks(2, _by_hand, "fsdp", habit)[0]
    assert max(float((one - other).abs().max()) for one, other in zip(wanted, got, strict=True)) < 1e-5


def _in_odd_order(strategy: str, order: str, **fields: Any) -> dict[str, torch.Tensor]:
    """Train where torch leaves the parameters of no block gathered: in front of a backward, or after an evaluation."""
    accelerator = Accelerator(strategy=strategy, fsdp_plugin=plugin(**fields) if strategy == "fsdp" else None)
    torch.manual_seed(3)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3))
    words = torch.randint(0, 11, (4, 4), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        if order == "zero_grad":
            model.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if order == "evaluation":
            with torch.no_grad():
                model(words)
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.2))
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize(
    ("order", "fields"),
    [("zero_grad", {}), ("zero_grad", {"reshard_after_forward": False}), ("evaluation", {})],
    ids=["zero_grad", "zero_grad, kept", "evaluation"],
)
def test_parameters_that_are_gathered_meanwhile_are_no_others(order: str, fields: dict[str, Any]) -> None:
    def train(strategy: str) -> dict[str, torch.Tensor]:
        return _in_odd_order(strategy, order, **fields)

    assert _furthest(run_ranks(1, train, "auto")[0], run_ranks(2, train, "fsdp")[0]) < 1e-5


def test_a_sharded_model_may_be_told_its_device_again() -> None:
    def train() -> dict[str, torch.Tensor]:
        accelerator = Accelerator(strategy="fsdp")
        torch.manual_seed(3)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9))
        model.to(accelerator.device).float()
        _fit(model, optimizer, _batches(2, accelerator.process_index), accelerator.backward)
        return accelerator.get_state_dict(model)

    assert _furthest(_alone(Net), run_ranks(2, train)[0]) < 1e-5


def test_data_of_another_shape_or_type_is_refused() -> None:
    def refused() -> bool:
        model = Accelerator(strategy="fsdp").prepare(nn.Linear(3, 2))
        with pytest.raises(ValueError, match=r"of shape \(2, 3\) and torch.float32 values of shape \(3, 3\)"):
            model.weight.data = torch.ones(3, 3)
        with pytest.raises(ValueError, match="rows cannot change their shape or type after prepare"):
            model.weight.data = model.weight.data.half()
        return True

    assert run_ranks(2, refused) == [True, True]


WRITES: list[Callable[[nn.Module], Any]] = [
    lambda model: model.weight[0].zero_(),
    lambda model: model.weight.data[1].fill_(0.5),
    lambda model: nn.init.normal_(model.weight[1:3]),
    lambda model: model.weight.narrow(0, 1, 2).copy_(torch.ones(2, 4)),
    lambda model: model.weight.chunk(3)[0].mul_(2.0),
    lambda model: model.weight[0].__setitem__(1, 0.0),
]


def test_a_write_into_a_part_that_is_a_copy_is_refused_and_one_that_reaches_the_parameter_is_made() -> None:
    def write() -> list[torch.Tensor]:
        model = Accelerator(strategy="fsdp").prepare(nn.Linear(4, 6))
        before = model.weight.full_tensor().detach().clone()
        with torch.no_grad():
            for number, each in enumerate(WRITES):
                with pytest.raises(NotImplementedError, match=r"copy, and the tensor would stay .*: weight\[0\] = 0.0"):
                    each(model)
                assert torch.equal(model.weight.full_tensor(), before), number
            model.weight[0] = 0.0
            model.weight[1:3] += 1.0
            model.weight[:, 2].zero_()  # no copy
            assert model.weight[3].norm().item() == pytest.approx(model.weight.full_tensor()[3].norm().item())
        return [before, model.weight.full_tensor().detach()]

    for before, after in run_ranks(2, write):
        before[0] = 0.0
        before[1:3] += 1.0
        before[:, 2] = 0.0
        assert torch.equal(before, after)


def _without_words_about_a_gradient(model: nn.Module) -> Any:
    return torch.autograd.grad(model(X).sum(), model.parameters(), allow_unused=True)


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (_without_words_about_a_gradient, r"torch.autograd.grad of sharded parameters.*take parameter.grad"),
        (lambda model: torch.autograd.grad(model(X).sum(), model[0].weight), r"torch.autograd.grad of sharded"),
        (
            lambda model: torch.func.functional_call(model, {"0.weight": model[0].weight * 2.0}, (X,)),
            r"functional_call with another 0.weight: FSDPSequential is sharded.*strategy='ddp'",
        ),
    ],
    ids=["grad", "grad of one", "functional_call"],
)
def test_what_torch_would_do_without_the_sharded_parameters_is_refused(
    call: Callable[[nn.Module], Any], refusal: str
) -> None:
    def refused() -> list[tuple[int, ...]]:
        model = Accelerator(strategy="fsdp").prepare(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
        with pytest.raises(NotImplementedError, match=refusal):
            call(model)
        x = X.clone().requires_grad_()
        own = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        return [tuple(one.shape) for one in torch.autograd.grad(own.sum(), x)]

    assert run_ranks(2, refused) == [[(4, 3)], [(4, 3)]]


def _minimise(strategy: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(strategy=strategy)
    torch.manual_seed(3)
    net = nn.Linear(3, 2)  # LBFGS flattens gradients, which torch can where the number of ranks divides the rows
    model, optimizer = accelerator.prepare(net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.eye(3)) - 1.0).square().mean()
        accelerator.backward(loss)
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return accelerator.get_state_dict(model)


def test_an_optimizer_that_keeps_the_list_of_its_parameters_trains_the_shards() -> None:
    assert _furthest(run_ranks(1, _minimise, "auto")[0], run_ranks(2, _minimise, "fsdp")[0]) < 1e-5


@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_a_hook_on_a_gradient_that_would_not_be_called_is_refused(when: str) -> None:
    def refused() -> bool:
        accelerator = Accelerator(strategy="fsdp")
        net = nn.Linear(3, 2)
        with pytest.raises(NotImplementedError, match="autograd, which would never call this hook"):
            if when == "before prepare":
                net.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
            accelerator.prepare(net).weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return True

    assert run_ranks(2, refused) == [True, True]


# -- groups


def _names(model: nn.Module, policy: GroupPolicy, uniform_dtype: bool = False) -> list[list[str]]:
    names = {id(module): name or "root" for name, module in model.named_modules()}
    groups = choose_groups(model, policy, uniform_dtype).groups
    return [[names[id(module)] for module in group] for group in groups]


BLOCKS = [["blocks.0"], ["blocks.1"], ["blocks.2"]]


def test_blocks_are_the_members_of_the_outermost_lists() -> None:
    assert _names(Net(), GroupPolicy()) == [*BLOCKS, ["root"]]
    assert _names(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), GroupPolicy()) == [["0"], ["2"], ["root"]]
    assert _names(nn.Linear(1, 1), GroupPolicy()) == [["root"]]


def test_a_model_of_transformers_names_its_blocks() -> None:
    net = Net()
    net._no_split_modules = ["Block"]
    assert sorted(_names(nn.Sequential(net, nn.Linear(1, 1)), GroupPolicy())) == sorted(
        [[f"0.{name}"] for [name] in BLOCKS] + [["root"]]
    )


def test_a_model_inside_that_generates_gathers_what_no_block_of_it_has() -> None:
    class Generates(Net):
        def generate(self) -> None: ...

    outer = nn.Module()
    outer.inner = Generates()
    assert _names(outer, GroupPolicy()) == [[f"inner.{name}"] for [name] in BLOCKS] + [["inner"], ["root"]]


def test_a_class_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"names Layer, and Net has no module of that class\. It has Block, Embedding"):
        choose_groups(Net(), GroupPolicy("transformer_based_wrap", ["Layer"]), False)


def test_sharers_in_different_blocks_are_one_group() -> None:
    assert _names(_tied(), GroupPolicy()) == [*BLOCKS, ["root"]]  # the root has both anyway
    assert _names(_tied_across_blocks(), GroupPolicy()) == [["blocks.0", "blocks.2", "blocks.1"], ["root"]]
    tied = Net()
    tied.blocks[1].up.weight = tied.embed.weight = nn.Parameter(torch.ones(11, 6))  # type: ignore[union-attr]
    assert _names(tied, GroupPolicy()) == [["embed", "blocks.1"], ["blocks.0"], ["blocks.2"], ["root"]]


def test_a_module_of_another_type_is_a_group_of_its_own() -> None:
    assert _names(_half_of_one_block(), GroupPolicy(), uniform_dtype=True) == [["blocks.1.down"], *BLOCKS, ["root"]]


def _with_a_block_sharded_before() -> tuple[list[str], bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    names = list(mesh._dim_group_names)
    fully_shard(model[0], mesh=mesh)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(2, 4)).mean())
    return [*names, *mesh._dim_group_names], all(p.grad is not None for p in model.parameters())


def test_a_block_that_the_program_has_sharded_keeps_its_process_groups() -> None:
    for names, has_gradients in run_ranks(2, _with_a_block_sharded_before):
        assert names[:2] == names[2:]
        assert has_gradients
