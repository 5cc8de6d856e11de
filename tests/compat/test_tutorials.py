"""The samples of widely read tutorials on Accelerate, made runnable, in one rank and in two.

Where a tutorial's text promises something that Accelerate does not do (`state.gather`, `destroy_process_group` on an
Accelerator and training on after it, `save_state` on the main process only), ours does as the text says.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from nbaccel import (
    Accelerator,
    PartialState,
    RanksFailed,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from nbaccel.testing import run_ranks
from nbaccel.utils import gather_object

in_one_rank_and_two = pytest.mark.parametrize("world_size", [1, 2])


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


@dataclass
class Config:
    name_or_path: str = "tiny"


class Model(nn.Module):
    """What tutorials call `model`: keyword arguments in, an object with a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.backbone = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor, use_checkpointing: bool = False) -> Output:
        hidden = checkpoint(self.backbone, x, use_reentrant=False) if use_checkpointing else self.backbone(x)
        logits = self.head(torch.relu(hidden))
        return Output(F.cross_entropy(logits, labels), logits)


def samples(count: int = 48) -> list[dict[str, Tensor]]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": x, "labels": (x.sum() > 0).long()} for x in inputs]


def parts(batch_size: int = 4) -> tuple[Model, torch.optim.Optimizer, Any, Any]:
    """model, optimizer, scheduler, loader"""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return model, optimizer, scheduler, DataLoader(samples(), batch_size=batch_size)  # type: ignore[arg-type]


def weights(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def run(world_size: int, sample: Callable[..., Any], folder: Path | None = None) -> list[Any]:
    """What `sample` returns in every rank; it works in `folder`."""

    def in_folder() -> Any:
        if folder is not None:
            os.chdir(folder)
        return sample()

    return run_ranks(world_size, in_folder)


# -- the long tutorial


def _template() -> Any:
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4, log_with="wandb")
    torch.manual_seed(42 + accelerator.process_index)
    model, optimizer, _, train_loader = parts(batch_size=16 // accelerator.num_processes)
    warnings.filterwarnings("ignore", message="fp16")
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    for epoch in range(2):
        model.train()
        pbar = tqdm(train_loader, disable=not accelerator.is_main_process, desc=f"Epoch {epoch}")
        for batch in pbar:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.is_main_process:
                pbar.set_postfix({"loss": loss.item()})
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save_state(f"checkpoint_epoch_{epoch}")
    accelerator.end_training()
    return weights(accelerator.unwrap_model(model))


@in_one_rank_and_two
def test_the_portable_template(world_size: int, tmp_path: Path) -> None:
    answers = run(world_size, _template, tmp_path)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] != weights(parts()[0])
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_epoch_0", "checkpoint_epoch_1"]


def _inference() -> Any:
    state = PartialState()
    model = nn.Linear(1, 1).to(state.device)
    inputs = ["prompt"] * 100
    with state.split_between_processes(inputs) as local_inputs:
        outputs = model(torch.ones(len(local_inputs), 1)).detach()
    all_outputs = state.gather(outputs)
    return len(local_inputs), tuple(all_outputs.shape)


@in_one_rank_and_two
def test_inputs_are_split_and_outputs_gathered_by_the_state(world_size: int) -> None:
    assert run(world_size, _inference) == [(100 // world_size, (100, 1))] * world_size


class YourLargeModel(nn.Module):
    """Continues texts of one length, greedily; a byte is a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(40))
        self.head = nn.Linear(16, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    @torch.no_grad()
    def generate(self, prompts: list[str]) -> Tensor:
        ids = torch.tensor([list(prompt.encode()) for prompt in prompts])
        for _ in range(4):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def large() -> YourLargeModel:
    torch.manual_seed(0)
    return YourLargeModel()


def _maps_and_generates(max_memory: dict[int | str, str]) -> Any:
    accelerator = Accelerator()
    state = PartialState()
    model = large().to(state.device)
    # For very large models
    device_map = infer_auto_device_map(model, max_memory=max_memory)
    with warnings.catch_warnings():  # of the map's device, on a machine without one
        warnings.filterwarnings("ignore", message="device_map names device 0")
        model = accelerator.prepare(model, device_map=device_map)
    inputs = ["prompt"] * 100
    with state.split_between_processes(inputs) as local_inputs:
        outputs = model.generate(local_inputs)
    all_outputs = state.gather(outputs)
    return len(local_inputs), torch.equal(all_outputs, large().generate(inputs))


@in_one_rank_and_two
@pytest.mark.parametrize(
    "max_memory", [{0: "16GiB", 1: "16GiB"}, {0: "16GiB", "cpu": "30GiB"}, {"cpu": "30GiB"}], ids=str
)
def test_inputs_are_split_over_models_with_a_device_map(world_size: int, max_memory: dict[int | str, str]) -> None:
    answers = run(world_size, lambda: _maps_and_generates(max_memory))
    assert answers == [(100 // world_size, True)] * world_size


def test_a_map_that_needs_both_devices_takes_one_process() -> None:
    """Of a model that is larger than one, whose ranks would need both."""
    with pytest.raises(RanksFailed, match="device_map spreads YourLargeModel over 0, 1, and there are 2 processes"):
        run(2, lambda: _maps_and_generates({0: "50KB", 1: "50KB"}))


def _trains_after_a_map() -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(large(), device_map={"": "cpu"})
    return accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))


def test_a_model_with_a_map_is_trained_with_an_optimizer_of_the_same_call() -> None:
    """Without one it is for inference: its methods are at hand, and gradients would stay apart."""
    with pytest.raises(
        RanksFailed, match=r"trains embed\.weight, .* of YourLargeModel, .* prepare\(model, optimizer, device_map"
    ):
        run(2, _trains_after_a_map)

    def trained() -> list[float]:
        accelerator = Accelerator()
        model = large()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer, device_map={"": "cpu"})
        accelerator.backward(model(torch.arange(4) + accelerator.process_index).square().mean())
        optimizer.step()
        return weights(accelerator.unwrap_model(model))

    answers = run_ranks(2, trained)
    assert answers[0] == answers[1]


def _prompts_of_a_model_on_the_disk(checkpoint: Path) -> Any:
    """Prompts as in Accelerate's guide to distributed inference, for a model that is larger than the memory."""
    distributed_state = PartialState()
    with init_empty_weights():
        model = YourLargeModel()
    device_map = infer_auto_device_map(model, max_memory={"cpu": "60KB"})
    assert "disk" in device_map.values()
    model = load_checkpoint_and_dispatch(model, checkpoint, device_map=device_map)
    prompts = ["roses", "are red", "violets", "blue", "sugar"]
    with distributed_state.split_between_processes(prompts, apply_padding=True) as my_prompts:
        completions = [bytes(row.tolist()) for prompt in my_prompts for row in model.generate([prompt])]
    gathered = gather_object(completions)[: len(prompts)]
    return gathered == [bytes(large().generate([prompt])[0].tolist()) for prompt in prompts]


@in_one_rank_and_two
def test_prompts_are_split_over_models_on_the_disk(world_size: int, tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(large(), tmp_path)
    assert run(world_size, lambda: _prompts_of_a_model_on_the_disk(tmp_path)) == [True] * world_size


class Tokenizer:
    def __call__(self, texts: list[str], return_tensors: str, padding: bool) -> Tokens:
        rows = [torch.tensor(list(text.encode())) for text in texts]
        return Tokens({"input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True)})

    def decode(self, rows: Tensor) -> list[str]:
        return [bytes(row[row > 0].tolist()).decode() for row in rows]


class Tokens(dict[str, Tensor]):
    def to(self, device: torch.device) -> Tokens:
        return Tokens({name: tensor.to(device) for name, tensor in self.items()})


class Generator(nn.Module):
    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        return torch.cat([input_ids, torch.full((len(input_ids), 1), ord("!"))], 1)[:, -max_new_tokens:]


def _generation() -> Any:
    state = PartialState()
    model, tokenizer = Generator(), Tokenizer()
    model.eval()
    model.to(state.device)
    prompts = [f"Story {number}" for number in range(5)]
    with state.split_between_processes(prompts, apply_padding=True) as my_prompts:
        inputs = tokenizer(my_prompts, return_tensors="pt", padding=True).to(state.device)
        with torch.inference_mode():
            outputs = model.generate(**inputs, max_new_tokens=120)
        generated = tokenizer.decode(outputs)
    return state.gather(generated)


@in_one_rank_and_two
def test_generated_texts_are_gathered_with_the_padding_behind(world_size: int) -> None:
    expected = [f"Story {number}!" for number in range(5)] + ["Story 4!"] * (world_size - 1)
    assert run(world_size, _generation) == [expected] * world_size


def _four_in_one_call() -> Any:
    accelerator = Accelerator()
    model, optimizer, _, train_loader = parts()
    eval_loader = DataLoader(samples(10), batch_size=4)  # type: ignore[arg-type, var-annotated]
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    for batch in train_loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    seen = [accelerator.gather_for_metrics(batch["labels"]) for batch in eval_loader]
    return sum(len(labels) for labels in seen), weights(accelerator.unwrap_model(model))


@in_one_rank_and_two
def test_everything_is_prepared_in_one_call(world_size: int) -> None:
    answers = run(world_size, _four_in_one_call)
    assert answers[0][0] == 10
    assert all(answer == answers[0] for answer in answers)


def _checkpointing_and_clipping() -> Any:
    accelerator = Accelerator()
    model, optimizer, _, loader = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms = []
    for batch in loader:
        loss = model(**batch, use_checkpointing=True).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm=0.1)))
        clipped = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert float(clipped) <= 0.1001
        optimizer.step()
        optimizer.zero_grad()
    return norms


@in_one_rank_and_two
def test_recomputed_activations_go_with_clipping(world_size: int) -> None:
    answers = run(world_size, _checkpointing_and_clipping)
    assert max(answers[0]) > 0.1
    assert answers[0] == answers[-1]


def _divides_by_itself() -> Any:
    """A tutorial divides the loss, and so does `backward`: as with Accelerate, the window weighs 1/N of its mean."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for _ in range(2):
        with accelerator.accumulate(model):
            loss = model(torch.ones(1, 1)).sum() / accelerator.gradient_accumulation_steps
            accelerator.backward(loss)
    return float(next(model.parameters()).grad)


@in_one_rank_and_two
def test_a_loss_that_the_program_divides_is_divided_twice_as_with_accelerate(world_size: int) -> None:
    assert run(world_size, _divides_by_itself) == [0.5] * world_size


def _main_process_saves() -> Any:
    accelerator = Accelerator()
    model, optimizer, _, loader = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    random.seed(accelerator.process_index)
    accelerator.backward(model(**next(iter(loader))).loss)
    optimizer.step()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save_state("checkpoints/last")
    accelerator.wait_for_everyone()
    before = weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.load_state("checkpoints/last")
    return before, weights(model) == before, [str(warning.message) for warning in said]


@in_one_rank_and_two
def test_the_main_process_alone_saves_and_all_load(world_size: int, tmp_path: Path) -> None:
    answers = run(world_size, _main_process_saves, tmp_path)
    assert [is_same for _, is_same, _ in answers] == [True] * world_size
    assert answers[0][0] == answers[-1][0]
    assert all("rank(s) 1 of 2 begin new random numbers" in text for text in answers[0][2])
    assert len(answers[0][2]) == world_size - 1


def _main_process_evaluates(evaluate: Callable[[Accelerator, Any, Any], Any]) -> Any:
    accelerator = Accelerator()
    model, optimizer, _, loader = parts()
    eval_loader = DataLoader(samples(8), batch_size=4)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    result = None
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            result = evaluate(accelerator, model, eval_loader)
        accelerator.wait_for_everyone()
    return result, weights(model)


def _plainly(accelerator: Accelerator, model: Any, loader: Any) -> float:
    with torch.no_grad():
        return sum(float(accelerator.unwrap_model(model)(**batch).loss) for batch in loader)


def _with_a_gather(accelerator: Accelerator, model: Any, loader: Any) -> Any:
    return [accelerator.gather_for_metrics(batch["labels"]) for batch in loader]


@in_one_rank_and_two
def test_the_main_process_evaluates_between_two_barriers(world_size: int) -> None:
    answers = run(world_size, lambda: _main_process_evaluates(_plainly))
    assert answers[0][0] > 0
    assert answers[0][1] == answers[-1][1]


def test_a_gather_under_is_main_process_is_an_error_and_no_hang() -> None:
    with pytest.raises(RanksFailed, match="a call under `if is_main_process`"):
        run(2, lambda: _main_process_evaluates(_with_a_gather))


def _unwraps() -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(Model())
    base_model = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model_final.pth")
    accelerator.wait_for_everyone()
    Model().load_state_dict(torch.load("model_final.pth", weights_only=True))
    return base_model.config.name_or_path


@in_one_rank_and_two
def test_the_base_model_has_its_attributes_and_a_clean_state_dict(world_size: int, tmp_path: Path) -> None:
    assert run(world_size, _unwraps, tmp_path) == ["tiny"] * world_size


@dataclass
class Wandb:
    """Stands for the module: what the main process alone sends."""

    rows: list[dict[str, float]] = field(default_factory=list)

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)


def _main_process_logs() -> Any:
    wandb = Wandb()
    accelerator = Accelerator()
    model, optimizer, _, loader = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in tqdm(loader, disable=not accelerator.is_main_process):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.is_main_process:
            wandb.log({"train_loss": loss.item()})
    return len(wandb.rows)


@in_one_rank_and_two
def test_the_main_process_logs(world_size: int) -> None:
    assert run(world_size, _main_process_logs) == [12 // world_size] + [0] * (world_size - 1)


def _train_stage(model: Any, optimizer: Any, loader: Any, accelerator: Accelerator, epochs: int) -> Any:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def _two_stages() -> Any:
    accelerator = Accelerator()
    model, _, _, loader = parts()
    model.backbone.requires_grad_(False)
    before = weights(model.backbone)
    optimizer1 = torch.optim.SGD(model.head.parameters(), lr=0.1)
    model = _train_stage(model, optimizer1, loader, accelerator, epochs=2)
    kept = weights(model.backbone) == before
    accelerator.destroy_process_group()
    accelerator.print("Pre-training stage completed — process group released")
    model.backbone.requires_grad_(True)
    optimizer2 = torch.optim.SGD(model.parameters(), lr=0.1)
    model = _train_stage(model, optimizer2, loader, accelerator, epochs=2)
    accelerator.end_training()
    return kept, weights(model.backbone) != before, weights(model)


@in_one_rank_and_two
def test_a_second_stage_trains_on_after_the_group_was_destroyed(world_size: int) -> None:
    answers = run(world_size, _two_stages)
    assert answers[0][:2] == (True, True)
    assert answers[0] == answers[-1]


def _many_experiments() -> Any:
    found = []
    for experiment_id in range(5):
        accelerator = Accelerator(mixed_precision="bf16")
        torch.manual_seed(experiment_id)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(samples(), batch_size=4)  # type: ignore[arg-type, var-annotated]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(sum(map(abs, weights(model))))
        accelerator.destroy_process_group()
        accelerator.print(f"Experiment {experiment_id} finished")
    return found, accelerator.num_processes


@in_one_rank_and_two
def test_experiments_follow_each_other(world_size: int) -> None:
    answers = run(world_size, _many_experiments)
    assert len(set(answers[0][0])) == 5
    assert answers == [(answers[0][0], world_size)] * world_size


def _frees_then_destroys() -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(Model())
    with torch.inference_mode():
        model(**{name: tensor[None] for name, tensor in samples(1)[0].items()})
    accelerator.free_memory()
    accelerator.destroy_process_group()
    return int(accelerator.reduce(torch.ones(())))


@in_one_rank_and_two
def test_inference_frees_then_destroys_and_the_next_collective_forms_a_new_group(world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(world_size, _frees_then_destroys) == [world_size] * world_size


# -- the notes on training language models


def _workflow() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, scheduler, train_loader = parts()
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    scheduler = accelerator.prepare(scheduler)
    for epoch in range(2):
        for batch in train_loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    outputs = model(**batch)
                    loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(f"checkpoints/epoch_{epoch}")
        accelerator.log({"epoch": epoch, "loss": loss.item(), "lr": scheduler.get_last_lr()[0]})
    inputs = torch.ones(1).to(accelerator.device)
    return weights(accelerator.unwrap_model(model)), scheduler.get_last_lr()[0], inputs.device == accelerator.device


@in_one_rank_and_two
def test_the_training_workflow(world_size: int, tmp_path: Path) -> None:
    answers = run(world_size, _workflow, tmp_path)
    assert answers[0] == answers[-1]
    # 12 batches, dealt to the ranks, two per step, two epochs; the scheduler moves once per rank and step.
    assert answers[0][1] == pytest.approx(1e-2 * 0.9**12)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["epoch_0", "epoch_1"]


def _saves_everywhere() -> Any:
    accelerator = Accelerator()
    model, optimizer, _, loader = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(accelerator.process_index)
    accelerator.save_state(output_dir="checkpoints/")
    accelerator.wait_for_everyone()
    drawn = float(torch.rand(()))
    accelerator.load_state("checkpoints/")
    return drawn, float(torch.rand(()))


@in_one_rank_and_two
def test_every_rank_saves_and_finds_its_own_random_numbers(world_size: int, tmp_path: Path) -> None:
    answers = run(world_size, _saves_everywhere, tmp_path)
    assert all(drawn == again for drawn, again in answers)
    assert len({drawn for drawn, _ in answers}) == world_size


def test_ddp_by_hand_and_prepare_give_the_same_gradients() -> None:
    def gradients(by_hand: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Linear(3, 1)
        state = PartialState()
        accelerator = Accelerator()
        model = nn.parallel.DistributedDataParallel(model) if by_hand else accelerator.prepare(model)
        model(torch.ones(2, 3) * state.process_index).sum().backward()
        return [value for parameter in model.parameters() for value in parameter.grad.flatten().tolist()]

    assert run_ranks(2, gradients, True) == run_ranks(2, gradients, False)


def test_early_stopping_is_agreed_upon() -> None:
    def loop() -> int:
        accelerator = Accelerator()
        for step in range(10):
            if accelerator.process_index == 1 and step == 3:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        return step

    assert run_ranks(2, loop) == [3, 3]


def test_the_effective_batch_size_is_that_of_the_formula() -> None:
    def steps() -> int:
        accelerator = Accelerator(gradient_accumulation_steps=3)
        model = accelerator.prepare(nn.Linear(1, 1))
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(96, 1)), batch_size=4))
        taken = 0
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                taken += accelerator.sync_gradients
        return taken

    assert run_ranks(2, steps) == [96 // (4 * 2 * 3)] * 2
