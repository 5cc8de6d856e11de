"""Small training loops as strangers write them: nothing of ours in them, and hardly a word about ranks.

Each is a function without arguments that returns the tensors it ends with (weights, buffers, states of optimizers) and
the numbers it printed. Numbers are read after the backward, since before it a rank knows only its part of a batch.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from torch.optim import swa_utils
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

__all__ = ["LOOPS", "Loop", "Values", "ends", "net", "points", "sgd"]

Values = tuple[list[Tensor], list[float]]


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop, and what is asked of it in several ranks.

    is_split: its batches are cut; otherwise every rank computes them whole.
    is_exact: it ends with the numbers of one process; otherwise ranks are equal and make as many steps.
    may_refuse: it may end in an error of ours instead, since a batch was cut before it was seen that none must be.
    shows_parts: its loss has terms that count differently, so each rank prints that of its part, and says so.
    is_slow: it takes seconds.
    """

    name: str
    function: Callable[[], Values]
    is_split: bool = True
    is_exact: bool = True
    may_refuse: bool = False
    shows_parts: bool = False
    is_slow: bool = False

    def run(self) -> Values:
        """What the loop ends with and prints, begun in float64 and with the same random states each time."""
        was = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        random.seed(0)
        try:
            return self.function()
        finally:
            torch.set_default_dtype(was)


LOOPS: list[Loop] = []


def loop(**expected: bool) -> Callable[[Callable[[], Values]], Callable[[], Values]]:
    def enlist(function: Callable[[], Values]) -> Callable[[], Values]:
        LOOPS.append(Loop(function.__name__, function, **expected))
        return function

    return enlist


# What the loops share: data, models, and what is returned. ------------------------------------------------------------


def points(count: int = 26, seed: int = 1) -> TensorDataset:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def labelled(count: int = 26, classes: int = 3, seed: int = 1) -> TensorDataset:
    (x, y) = points(count, seed).tensors
    return TensorDataset(x, (y.squeeze(1) * 10).long().remainder(classes))


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(outputs: int = 1, inputs: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def ends(*things: Any) -> list[Tensor]:
    """Weights and buffers of models, tensors of the states of optimizers, and tensors as they are."""
    found: list[Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += thing.state_dict().values()
        elif isinstance(thing, torch.optim.Optimizer):
            for state in thing.state_dict()["state"].values():
                found += [value for value in state.values() if isinstance(value, Tensor)]
        else:
            found.append(thing)
    return [tensor.detach().to_dense().clone() for tensor in found]


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    epochs: int = 2,
) -> list[float]:
    """The loop of every tutorial, for those whose point is something else."""
    printed = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return printed


# Optimizers -----------------------------------------------------------------------------------------------------------


def with_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Values:
    model = net()
    optimizer = kind(model.parameters(), **options)
    printed = fit(model, optimizer, DataLoader(points(), batch_size=7, shuffle=True))
    return ends(model, optimizer), printed


@loop()
def plain_sgd() -> Values:
    return with_optimizer(torch.optim.SGD, lr=0.1)


@loop()
def momentum() -> Values:
    return with_optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


@loop()
def adamw() -> Values:
    return with_optimizer(torch.optim.AdamW, lr=1e-2)


@loop()
def adamw_fused() -> Values:
    return with_optimizer(torch.optim.AdamW, lr=1e-2, fused=True)


@loop()
def adamw_foreach() -> Values:
    return with_optimizer(torch.optim.AdamW, lr=1e-2, foreach=True)


@loop()
def adagrad() -> Values:
    return with_optimizer(torch.optim.Adagrad, lr=1e-2)


@loop()
def rmsprop() -> Values:
    return with_optimizer(torch.optim.RMSprop, lr=1e-2)


@loop()
def lbfgs_with_line_search() -> Values:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=13):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            printed.append(optimizer.step(closure).item())
    return ends(model), printed


@loop()
def sam() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            printed.append(loss.item())
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                steps = [p.grad * (0.05 / norm) for p in model.parameters()]
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.add_(step)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.sub_(step)
            optimizer.step()
            optimizer.zero_grad()
    return ends(model), printed


@loop()
def two_optimizers() -> Values:
    encoder, head = nn.Linear(5, 8), nn.Linear(8, 1)
    first, second = sgd(encoder), torch.optim.Adam(head.parameters(), lr=1e-2)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            first.zero_grad()
            second.zero_grad()
            loss = F.mse_loss(head(torch.relu(encoder(x))), y)
            loss.backward()
            first.step()
            second.step()
            printed.append(loss.item())
    return ends(encoder, head, second), printed


@loop()
def gradients_set_to_zero() -> Values:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad(set_to_none=False)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return ends(model, optimizer), []


@loop()
def update_by_hand() -> Values:
    w = torch.zeros(5, 1, requires_grad=True)
    b = torch.zeros(1, requires_grad=True)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            loss = ((x @ w + b - y) ** 2).mean()
            loss.backward()
            for p in (w, b):
                p.data -= 0.1 * p.grad
                p.grad = None
            printed.append(loss.item())
    return ends(w, b), printed


@loop()
def autograd_grad_of_parameters() -> Values:
    model = net()
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            loss = F.mse_loss(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p -= 0.1 * gradient
    return ends(model), []


# Steps: accumulation, clipping, scaling, averages of weights ----------------------------------------------------------


@loop()
def accumulation() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for i, (x, y) in enumerate(DataLoader(points(28), batch_size=7)):
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
            printed.append(loss.item())
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return ends(model), printed


@loop()
def accumulation_with_an_incomplete_window() -> Values:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(points(33), batch_size=7)
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            (F.mse_loss(model(x), y) / 3).backward()
            if (i + 1) % 3 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return ends(model, optimizer), []


@loop()
def loss_printed_without_its_divisor() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for i, (x, y) in enumerate(DataLoader(points(28), batch_size=7)):
        loss = F.mse_loss(model(x), y)
        (loss / 2).backward()
        printed.append(loss.item())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return ends(model), printed


@loop()
def one_backward_for_several_batches() -> Values:
    model = net()
    optimizer = sgd(model, 0.05)
    printed = []
    for _ in range(2):
        total = 0.0
        for i, (x, y) in enumerate(DataLoader(points(42), batch_size=7)):
            total = total + F.mse_loss(model(x), y)
            if i % 2:
                total.backward()
                optimizer.step()
                optimizer.zero_grad()
                printed.append(total.item())
                total = 0.0
    return ends(model), printed


@loop()
def clipping_by_norm() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            printed.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
    return ends(model), printed


@loop()
def clipping_by_value() -> Values:
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
            optimizer.step()
    return ends(model), []


def scaled(model: nn.Module, data: TensorDataset) -> Values:
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            printed += [loss.item(), scaler.get_scale()]
    return ends(model), printed


@loop()
def grad_scaler() -> Values:
    return scaled(net(), points())


@loop()
def grad_scaler_with_an_overflow() -> Values:
    x, y = points().tensors
    y[12] = 1e308  # the sixth of its batch: its gradient overflows in the last rank only
    return scaled(net(), TensorDataset(x, y))


@loop(is_exact=False)
def grad_scaler_in_single_precision() -> Values:
    x, y = points().tensors
    return scaled(net().float(), TensorDataset(x.float(), y.float()))


@loop(is_exact=False)
def autocast() -> Values:
    model = net(3).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = labelled().tensors
    printed = []
    for _ in range(2):
        for inputs, targets in DataLoader(TensorDataset(x.float(), y), batch_size=7):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def average_of_weights() -> Values:
    model = net()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                    e.mul_(0.9).add_(p, alpha=0.1)
    return ends(model, ema), []


@loop()
def stochastic_weight_averaging() -> Values:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    loader = DataLoader(points(), batch_size=7)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        if epoch > 0:
            average.update_parameters(model)
            schedule.step()
    swa_utils.update_bn(loader, average)
    return ends(model, average), []


@loop(is_split=False)
def hooks_on_tensors() -> Values:
    model = net()
    model[2].weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            hidden = model[1](model[0](x))
            hidden.register_hook(lambda gradient: gradient * 0.5)
            F.mse_loss(model[2](hidden), y).backward()
            optimizer.step()
    return ends(model), []


# Schedules and decisions ----------------------------------------------------------------------------------------------


@loop()
def schedule_per_step() -> Values:
    model = net()
    optimizer = sgd(model)
    loader = DataLoader(points(), batch_size=7)
    schedule = OneCycleLR(optimizer, max_lr=0.2, steps_per_epoch=len(loader), epochs=2)
    printed = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
            printed.append(schedule.get_last_lr()[0])
    return ends(model), printed


@loop()
def schedule_per_epoch() -> Values:
    model = net()
    optimizer = sgd(model)
    schedules = [StepLR(optimizer, 1, gamma=0.5), CosineAnnealingLR(optimizer, T_max=3)]
    printed = []
    for _ in range(3):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        printed.append(optimizer.param_groups[0]["lr"])
    return ends(model), printed


@loop()
def plateau_of_the_training_loss() -> Values:
    model = net()
    optimizer = sgd(model, 0.6)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    loader = DataLoader(points(), batch_size=7)
    printed = []
    for _ in range(5):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step(total / len(loader))
        printed += [total / len(loader), optimizer.param_groups[0]["lr"]]
    return ends(model), printed


@loop()
def plateau_of_the_validation_loss() -> Values:
    model = net()
    optimizer = sgd(model, 0.6)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    train, valid = DataLoader(points(), batch_size=7), DataLoader(points(10, seed=2), batch_size=4)
    printed = []
    for _ in range(4):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = sum(F.mse_loss(model(x), y, reduction="sum") for x, y in valid) / len(valid.dataset)
        schedule.step(loss)
        printed += [loss.item(), optimizer.param_groups[0]["lr"]]
    return ends(model), printed


@loop()
def early_stopping_keeps_the_best() -> Values:
    model = net()
    optimizer = sgd(model, 0.5)
    train, valid = DataLoader(points(), batch_size=7), DataLoader(points(10, seed=2), batch_size=4)
    best, state, waited, printed = float("inf"), {}, 0, []
    for _ in range(8):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in valid:
                total += F.mse_loss(model(x), y).item()
        printed.append(total)
        if total < best:
            best, state, waited = total, copy.deepcopy(model.state_dict()), 0
        elif (waited := waited + 1) == 2:
            break
    model.load_state_dict(state)
    return ends(model), printed


@loop()
def early_break() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(3):
        for i, (x, y) in enumerate(DataLoader(points(), batch_size=7, shuffle=True)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
            if i == 1:
                break
    return ends(model), printed


@loop()
def stop_at_a_training_loss() -> Values:
    model = net()
    optimizer = sgd(model)
    printed: list[float] = []
    for _ in range(20):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
        if loss.item() < 0.2:
            break
    return ends(model), printed


@loop()
def branch_by_the_step() -> Values:
    model = nn.ModuleList([net(), net()])
    optimizer = sgd(model)
    step = 0
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model[step % 2](x), y)
            loss.backward()
            optimizer.step()
            step += 1
            printed.append(loss.item())
    return ends(model), printed


@loop(is_exact=False)  # a part of a batch may take the other branch than the batch
def branch_by_the_content() -> Values:
    model = nn.ModuleDict({"body": net(4), "low": nn.Linear(4, 1), "high": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            hidden = model["body"](x)
            loss = F.mse_loss(model["high" if x.sum() > 0 else "low"](hidden), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model, optimizer), printed


@loop(is_exact=False)
def branch_by_the_rank() -> Values:
    """The one loop that knows of ranks: rank 0 trains with another head than the others."""
    model = nn.ModuleDict({"body": net(4), "first": nn.Linear(4, 1), "others": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    head = model["others" if int(os.environ.get("RANK", "0")) else "first"]
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(head(model["body"](x)), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model, optimizer), printed[1:]  # the first batch is whole in all ranks, and each has its own loss of it


# Models: what is trained, and how it is called ------------------------------------------------------------------------


@loop()
def frozen_part() -> Values:
    model = net()
    for p in model[0].parameters():
        p.requires_grad = False
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    printed = fit(model, optimizer, DataLoader(points(), batch_size=7))
    return ends(model), printed


@loop()
def unfrozen_later() -> Values:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        if epoch == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return ends(model, optimizer), []


class LowRank(nn.Module):
    """LoRA by hand: a frozen layer, and two matrices that are trained."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.A.T @ self.B.T


@loop()
def low_rank_adaptation() -> Values:
    model = net()
    loader = DataLoader(points(), batch_size=7)
    first = fit(model, sgd(model), loader, epochs=1)
    model[0], model[2] = LowRank(model[0]), LowRank(model[2])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    printed = first + fit(model, optimizer, loader)
    return ends(model), printed


@loop()
def data_parallel() -> Values:
    model = nn.DataParallel(net())
    printed = fit(model, sgd(model), DataLoader(points(), batch_size=7))
    return ends(model.module), printed


def compiled(part: Any) -> Any:
    """As ``torch.compile`` does it, less the seconds that its own backend takes: graphs of autograd are the same."""
    torch._inductor.config.compile_threads = 1  # an older torch would start processes that wait for work
    return torch.compile(part, backend="aot_eager")


@loop(is_slow=True)
def compiled_model() -> Values:
    torch._dynamo.reset()
    model = compiled(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train, valid = DataLoader(points(), batch_size=7, shuffle=True), DataLoader(points(10, seed=2), batch_size=4)
    printed = []
    for _ in range(2):
        model.train()
        printed += fit(model, optimizer, train, epochs=1)
        model.eval()
        with torch.no_grad():
            printed.append(sum(F.mse_loss(model(x), y).item() for x, y in valid))
    return ends(model, optimizer), printed


@loop(is_slow=True)
def compiled_in_every_epoch() -> Values:
    torch._dynamo.reset()
    model = net()
    optimizer, loader = sgd(model), DataLoader(points(), batch_size=7)
    printed = fit(model, optimizer, loader, epochs=1)
    for _ in range(2):
        printed += fit(compiled(model), optimizer, loader, epochs=1)
    return ends(model), printed


@loop(is_split=False, is_slow=True)  # nothing shows what it is a sum of
def compiled_loss() -> Values:
    torch._dynamo.reset()
    model = net()
    optimizer, criterion = sgd(model), compiled(lambda x, y: F.mse_loss(model(x), y))
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = criterion(x, y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False, is_slow=True)
def compiled_step() -> Values:
    """All of a step is one compiled function, as torch's tutorial has it."""
    torch._dynamo.reset()
    model = net()
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    whole, printed = compiled(step), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler, about what it does itself
        for _ in range(2):
            for x, y in DataLoader(points(), batch_size=7):
                printed.append(whole(x, y).item())
    return ends(model), printed


def with_checkpoint(is_reentrant: bool) -> Values:
    body, head = net(8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            x.requires_grad_()
            loss = F.mse_loss(head(checkpoint(body, x, use_reentrant=is_reentrant)), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(body, head), printed


@loop()
def checkpoint_reentrant() -> Values:
    return with_checkpoint(True)


@loop()
def checkpoint_not_reentrant() -> Values:
    return with_checkpoint(False)


def words(count: int = 26, length: int = 4) -> Tensor:
    return torch.randint(0, 9, (count, length), generator=torch.Generator().manual_seed(4))


@loop()
def tied_weights() -> Values:
    embedding, output = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
    output.weight = embedding.weight
    model = nn.Sequential(embedding, nn.Linear(6, 6), nn.Tanh(), output)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    printed = []
    for _ in range(2):
        for (text,) in DataLoader(TensorDataset(words()), batch_size=7):
            optimizer.zero_grad()
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 9), text[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


def with_sparse_embedding(embedding: nn.Embedding, optimizer: torch.optim.Optimizer) -> Values:
    head = nn.Linear(6, 1)
    other = sgd(head)
    data = TensorDataset(words(), points().tensors[1])
    printed = []
    for _ in range(2):
        for text, y in DataLoader(data, batch_size=7):
            optimizer.zero_grad()
            other.zero_grad()
            loss = F.mse_loss(head(embedding(text).mean(1)), y)
            loss.backward()
            optimizer.step()
            other.step()
            printed.append(loss.item())
    return ends(embedding, head, optimizer), printed


@loop()
def sparse_embedding() -> Values:
    embedding = nn.Embedding(30, 6, sparse=True)
    return with_sparse_embedding(embedding, sgd(embedding))


@loop()
def sparse_adam() -> Values:
    embedding = nn.Embedding(30, 6, sparse=True)
    return with_sparse_embedding(embedding, torch.optim.SparseAdam(embedding.parameters(), lr=1e-2))


@loop()
def recurrent_with_a_sum_over_time() -> Values:
    body, head = nn.GRU(2, 6, batch_first=True), nn.Linear(6, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-2)
    data = TensorDataset(noise(26, 4, 2), noise(26, 4, 1, seed=6))
    printed = []
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=7):
            optimizer.zero_grad()
            outputs, _ = body(x)
            loss = torch.zeros(())
            for t in range(4):
                loss = loss + F.mse_loss(head(outputs[:, t]), y[:, t])
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(body, head), printed


@loop()
def teacher_forcing() -> Values:
    cell, head = nn.GRUCell(1, 6), nn.Linear(6, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    printed = []
    for _ in range(2):
        for (y,) in DataLoader(TensorDataset(noise(26, 4, 1)), batch_size=7):
            optimizer.zero_grad()
            state, step = torch.zeros(len(y), 6), torch.zeros(len(y), 1)
            loss = 0.0
            for t in range(4):
                state = cell(step, state)
                guess = head(state)
                loss = loss + F.mse_loss(guess, y[:, t])
                step = y[:, t] if random.random() < 0.5 else guess.detach()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(cell, head), printed


@loop()
def batch_used_twice() -> Values:
    model = net()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            guess = functional_call(model, weights, (x,))
            mirrored = functional_call(model, weights, (-x,))
            loss = F.mse_loss(guess, y) + 0.3 * F.mse_loss(mirrored, guess.detach())
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(*weights.values()), printed


@loop()
def distillation() -> Values:
    teacher, student = net(3).eval(), net(3)
    optimizer = sgd(student)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(labelled(), batch_size=7):
            optimizer.zero_grad()
            with torch.no_grad():
                soft = F.softmax(teacher(x) / 2, dim=1)
            logits = student(x)
            loss = F.kl_div(F.log_softmax(logits / 2, dim=1), soft, reduction="batchmean") * 4 + F.cross_entropy(
                logits, y
            )
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(teacher, student), printed


@loop()
def adversarial_examples() -> Values:
    model = net(3)
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(labelled(), batch_size=7):
            x.requires_grad_()
            F.cross_entropy(model(x), y).backward()
            worse = (x + 0.1 * x.grad.sign()).detach()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(worse), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def gan_with_r1() -> Values:
    generator, critic = net(5, 3), net(1)
    first, second = (torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, critic))
    bce = nn.BCEWithLogitsLoss()
    printed = []
    for _ in range(2):
        for z, real in DataLoader(TensorDataset(noise(26, 3), points().tensors[0]), batch_size=7):
            one, zero = torch.ones(len(z), 1), torch.zeros(len(z), 1)
            second.zero_grad()
            fake = generator(z)
            loss_real = bce(critic(real), one)
            loss_real.backward()
            bce(critic(fake.detach()), zero).backward()
            real.requires_grad_()
            (gradient,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
            (5.0 * gradient.pow(2).sum(1).mean()).backward()
            second.step()
            first.zero_grad()
            loss = bce(critic(fake), one)
            loss.backward()
            first.step()
            printed += [loss_real.item(), loss.item()]
    return ends(generator, critic), printed


@loop()
def wgan_with_gradient_penalty() -> Values:
    generator, critic = net(5, 3), net(1)
    first, second = (torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.0, 0.9)) for model in (generator, critic))
    data = TensorDataset(noise(26, 3), points().tensors[0], noise(26, 1, seed=7).sigmoid())
    printed = []
    for _ in range(2):
        for i, (z, real, alpha) in enumerate(DataLoader(data, batch_size=7)):
            fake = generator(z)
            between = (alpha * real + (1 - alpha) * fake.detach()).requires_grad_()
            scores = critic(between)
            (gradient,) = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True)
            penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
            loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
            second.zero_grad()
            loss.backward()
            second.step()
            printed.append(loss.item())
            if i % 2:
                first.zero_grad()
                (-critic(fake).mean()).backward()
                first.step()
    return ends(generator, critic), printed


# Noise and batch statistics: ranks are equal, but no longer one process -----------------------------------------------


@loop(is_exact=False)
def dropout() -> Values:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    printed = fit(model, sgd(model), DataLoader(points(), batch_size=7, shuffle=True))
    return ends(model), printed


@loop(is_exact=False)
def batch_norm() -> Values:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    printed = fit(model, sgd(model), DataLoader(points(28), batch_size=14, shuffle=True))
    model.eval()
    with torch.no_grad():
        printed.append(sum(F.mse_loss(model(x), y).item() for x, y in DataLoader(points(10, seed=2), batch_size=4)))
    return ends(model), printed


@loop(is_exact=False)
def noise_of_the_shape_of_a_batch() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(is_exact=False)
def diffusion_with_its_own_generator() -> Values:
    model = net(5, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(8)
    kept = torch.linspace(0.99, 0.1, 10)
    printed = []
    for _ in range(2):
        for x, _ in DataLoader(points(), batch_size=7, shuffle=True):
            t = torch.randint(0, 10, (len(x),), generator=generator)
            eps = torch.randn(x.shape, generator=generator)
            noisy = kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * eps
            loss = F.mse_loss(model(torch.cat([noisy, t[:, None] / 10], 1)), eps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


# Loaders --------------------------------------------------------------------------------------------------------------


@loop()
def loaders_in_sequence() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for loader in (DataLoader(points(), batch_size=7), DataLoader(points(10, seed=2), batch_size=4, shuffle=True)):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                printed.append(loss.item())
    return ends(model), printed


@loop(shows_parts=True)
def loaders_side_by_side() -> Values:
    model = net()
    optimizer = sgd(model)
    first, second = DataLoader(points(30), batch_size=7), DataLoader(points(18, seed=2), batch_size=4, shuffle=True)
    printed = []
    for _ in range(2):
        for (x, y), (u, v) in zip(first, second, strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) + 0.5 * F.l1_loss(model(u), v)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def cycle() -> Values:
    model = net()
    optimizer = sgd(model)
    batches = itertools.cycle(DataLoader(points(), batch_size=7))
    printed = []
    for _ in range(10):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop()
def cycle_of_sums() -> Values:
    model = net()
    optimizer = sgd(model, 0.01)
    batches = itertools.cycle(DataLoader(points(), batch_size=7))
    for _ in range(10):  # `cycle` keeps the first batch as it came: whole
        x, y = next(batches)
        optimizer.zero_grad()
        F.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
    return ends(model), []


@loop()
def next_by_hand() -> Values:
    model = net()
    optimizer = sgd(model)
    loader = DataLoader(points(), batch_size=7, shuffle=True)
    batches = iter(loader)
    printed = []
    for _ in range(14):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop()
def iterator_kept_over_epochs() -> Values:
    model = net()
    optimizer = sgd(model)
    batches = iter(DataLoader(points(60), batch_size=7))
    valid = DataLoader(points(10, seed=2), batch_size=4)
    printed = []
    for _ in range(3):
        model.train()
        for _ in range(3):
            x, y = next(batches)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            printed.append(sum(F.mse_loss(model(x), y).item() for x, y in valid))
    return ends(model), printed


@loop()
def window_of_batches_drawn_first() -> Values:
    model = net()
    optimizer = sgd(model)
    loader = DataLoader(points(42), batch_size=7)
    for _ in range(2):
        batches = iter(loader)
        while window := list(itertools.islice(batches, 2)):
            for x, y in window:
                (F.mse_loss(model(x), y) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ends(model), []


@loop()
def uneven_last_batch() -> Values:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    printed = fit(model, optimizer, DataLoader(points(29), batch_size=8, shuffle=True), epochs=3)
    return ends(model, optimizer), printed


@loop()
def last_batch_of_one_sample() -> Values:
    model = net()
    printed = fit(model, sgd(model), DataLoader(points(25), batch_size=8))
    return ends(model), printed


@loop()
def batches_smaller_than_the_world() -> Values:
    model = net()
    indices = [[0, 1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 13], [14]]
    printed = fit(model, sgd(model), DataLoader(points(15), batch_sampler=indices))
    return ends(model), printed


@loop(is_split=False)
def batches_of_one_sample() -> Values:
    model = net()
    printed = fit(model, sgd(model, 0.01), DataLoader(points(6), batch_size=1))
    return ends(model), printed


@loop()
def small_batches_of_sums() -> Values:
    model = net()
    indices = [[0, 1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 13], [14]]
    criterion = nn.MSELoss(reduction="sum")
    printed = fit(model, sgd(model, 0.02), DataLoader(points(15), batch_sampler=indices), criterion)
    return ends(model), printed


def windows_of_sums(indices: list[list[int]], length: int) -> Values:
    """A sum is divided by the batches of its window, which are fewer in the last one, by hand."""
    model = net()
    optimizer = sgd(model, 0.02)
    printed = []
    for _ in range(2):
        for number, (x, y) in enumerate(DataLoader(points(15), batch_sampler=indices)):
            batches = min(length, len(indices) - number // length * length)
            loss = F.mse_loss(model(x), y, reduction="sum") / batches
            loss.backward()
            printed.append(loss.item())
            if (number + 1) % length == 0 or number + 1 == len(indices):
                optimizer.step()
                optimizer.zero_grad()
    return ends(model), printed


@loop()
def a_divisor_larger_than_a_part_that_becomes_smaller() -> Values:
    return windows_of_sums([[0, 1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 13], [14]], 3)


@loop()
def a_divisor_as_large_as_the_first_batch_that_becomes_smaller() -> Values:
    return windows_of_sums([[0, 1], [2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12]], 2)


@loop()
def no_automatic_batches() -> Values:
    model = net()
    data = TensorDataset(noise(4, 7, 5), noise(4, 7, 1, seed=6))
    printed = fit(model, sgd(model), DataLoader(data, batch_size=None, shuffle=True))
    return ends(model), printed


@loop(is_split=False)
def no_automatic_batches_of_single_samples() -> Values:
    model = net()
    x, y = points(8).tensors
    data = TensorDataset(x, y.squeeze(1))
    criterion = lambda guess, target: (guess.squeeze() - target) ** 2  # noqa: E731
    printed = fit(model, sgd(model, 0.02), DataLoader(data, batch_size=None), criterion)
    return ends(model), printed


class Stream(IterableDataset[Any]):
    """Samples one after the other, without a length."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


@loop()
def iterable_data_set() -> Values:
    model = net()
    printed = fit(model, sgd(model), DataLoader(Stream(list(points())), batch_size=7))
    return ends(model), printed


class ByLabel:
    """Batches of one label each, shuffled by python's random."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __iter__(self) -> Iterator[list[int]]:
        for label in self.labels.unique():
            rows = (self.labels == label).nonzero().flatten().tolist()
            random.shuffle(rows)
            yield from (rows[start : start + 5] for start in range(0, len(rows), 5))

    def __len__(self) -> int:
        return sum(-(-int((self.labels == label).sum()) // 5) for label in self.labels.unique())


@loop()
def batch_sampler_of_ones_own() -> Values:
    model, data = net(3), labelled()
    loader = DataLoader(data, batch_sampler=ByLabel(data.tensors[1]))
    printed = fit(model, sgd(model), loader, F.cross_entropy)
    return ends(model), printed


@loop()
def weighted_sampler() -> Values:
    model = net()
    weights = noise(26).exp().tolist()
    sampler = WeightedRandomSampler(weights, 24, generator=torch.Generator().manual_seed(3))
    printed = fit(model, sgd(model), DataLoader(points(), batch_size=7, sampler=sampler))
    return ends(model), printed


@loop()
def seeded_in_the_loop() -> Values:
    model = net()
    optimizer = sgd(model)
    loader = DataLoader(points(), batch_size=7, shuffle=True)
    printed = []
    for epoch in range(3):
        torch.manual_seed(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def loader_with_workers() -> Values:
    model = net()
    loader = DataLoader(points(), batch_size=7, shuffle=True, num_workers=1, persistent_workers=True)
    printed = fit(model, sgd(model), loader)
    return ends(model), printed


def sentences(count: int = 26) -> list[Tensor]:
    return [row[: 2 + i % 4] for i, row in enumerate(words(count, 5))]


class Sentences(Dataset[Tensor]):
    def __init__(self) -> None:
        self.rows = sentences()

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    text = pad_sequence(rows, batch_first=True)
    return text, torch.arange(text.shape[1])[None] < lengths[:, None]


@loop()
def padding_with_a_mask() -> Values:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    printed = []
    for _ in range(2):
        for text, mask in DataLoader(Sentences(), batch_size=7, shuffle=True, collate_fn=padded):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")
            loss = (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def padding_that_counts() -> Values:
    """Samples are as long as the longest of their batch, and the model averages over all of it."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    printed = []
    for _ in range(2):
        for text, mask in DataLoader(Sentences(), batch_size=7, shuffle=True, collate_fn=padded):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(text).mean(1), mask.sum(1) % 3)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


def padded_time_first(rows: list[Tensor]) -> dict[str, Any]:
    lengths = [len(row) for row in rows]
    return {"text": pad_sequence(rows), "next": pad_sequence([row[1:] for row in rows]), "lengths": lengths}


@loop()
def time_before_samples() -> Values:
    """A batch whose second dimension counts samples, looked at by `view`, as models of sequences have it."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    printed = []
    for _ in range(2):
        for batch in DataLoader(Sentences(), batch_size=5, shuffle=True, collate_fn=padded_time_first):
            optimizer.zero_grad()
            shown = model(batch["text"])[:-1]
            loss = F.cross_entropy(shown.view(-1, 9), batch["next"].view(-1))
            loss.backward()
            optimizer.step()
            assert len(batch["lengths"]) == batch["text"].shape[1]
            printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def time_as_long_as_a_batch() -> Values:
    """A square batch: nothing shows which dimension counts samples, so a batch of its function is not cut."""
    torch.manual_seed(2)
    model, head = nn.RNN(1, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    loader = DataLoader(noise(24, 6, 1), batch_size=6, collate_fn=lambda rows: torch.stack(rows, 1))
    printed = []
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            out, _ = model(x[:-1])
            loss = F.mse_loss(head(out), x[1:])
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model, head), printed


@loop()
def sum_over_a_mask() -> Values:
    """By chance the parts have as many chosen samples, in each rank, as the whole first batch had."""
    chosen = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1]).bool()
    data = TensorDataset(*points(18).tensors, chosen)
    model = net()
    optimizer = sgd(model, 0.02)
    printed = []
    for _ in range(2):
        for x, y, mask in DataLoader(data, batch_size=6):
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2)[mask].sum()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def half_a_sum() -> Values:
    return with_loss(lambda guess, y: 0.5 * ((guess - y) ** 2).sum())


@loop()
def weights_decayed_by_hand() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
            printed.append(loss.item())
    return ends(model), printed


@loop()
def two_loaders_in_turns() -> Values:
    model = net()
    optimizer = sgd(model)
    one, other = DataLoader(points(24), batch_size=8), DataLoader(points(24, seed=3), batch_size=8)
    printed = []
    for _ in range(2):
        others = iter(other)
        for batch in one:
            for x, y in (batch, next(others)):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                printed.append(loss.item())
    return ends(model), printed


@loop()
def looked_at_before_a_warm_up() -> Values:
    model = net()
    optimizer, loader = sgd(model), DataLoader(points(), batch_size=7)
    x, _ = next(iter(loader))
    assert x.shape[1] == 5
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)
    printed = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        printed.append(loss.item())
    return [*ends(model), torch.tensor(scheduler.get_last_lr())], printed


def mixed_up(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    order = torch.randperm(len(x))
    return 0.7 * x + 0.3 * x[order], 0.7 * y + 0.3 * y[order]


@loop()
def mixing_in_collate() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7, shuffle=True, collate_fn=mixed_up):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


class Batch:
    """What nobody else can look into."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = (torch.stack(column) for column in zip(*samples, strict=True))


@loop()
def collate_into_an_object() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for batch in DataLoader(points(), batch_size=7, collate_fn=Batch):
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch.x), batch.y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


# Evaluation -----------------------------------------------------------------------------------------------------------


@loop()
def evaluation_without_gradients() -> Values:
    model = net(3)
    optimizer = sgd(model)
    train, valid = DataLoader(labelled(), batch_size=7, shuffle=True), DataLoader(labelled(10, seed=2), batch_size=4)
    printed = []
    for _ in range(3):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        right, total = 0, 0.0
        with torch.no_grad():
            for x, y in valid:
                logits = model(x)
                total += F.cross_entropy(logits, y, reduction="sum").item()
                right += (logits.argmax(1) == y).sum().item()
        printed += [total / len(valid.dataset), right / len(valid.dataset)]
    return ends(model), printed


@loop()
def evaluation_in_eval_mode() -> Values:
    model = net()
    optimizer = sgd(model)
    train, valid = DataLoader(points(), batch_size=7), DataLoader(points(10, seed=2), batch_size=4)
    printed = []
    for _ in range(3):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        total = 0.0
        for x, y in valid:
            total += F.mse_loss(model(x), y).item() * len(x)
        printed.append(total / len(valid.dataset))
    return ends(model), printed


@loop()
def evaluation_as_in_training() -> Values:
    model = net()
    optimizer = sgd(model)
    train, valid = DataLoader(points(), batch_size=7), DataLoader(points(10, seed=2), batch_size=4)
    printed = []
    for _ in range(3):
        for x, y in train:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        total = 0.0
        for x, y in valid:
            total += ((model(x) - y) ** 2).sum().item()
        printed.append(total / len(valid.dataset))
    return ends(model), printed


@loop()
def evaluation_over_the_training_data() -> Values:
    model = net()
    optimizer = sgd(model)
    train = DataLoader(points(), batch_size=7, shuffle=True)
    printed = []
    for _ in range(3):
        for x, y in train:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            printed.append(sum(F.mse_loss(model(x), y, reduction="sum").item() for x, y in train))
        total = 0.0
        for x, y in train:
            total += (model(x) - y).abs().sum().item()
        printed.append(total)
    return ends(model), printed


@loop()
def evaluation_that_breaks_off() -> Values:
    model = net()
    optimizer = sgd(model)
    train, valid = DataLoader(points(), batch_size=7), DataLoader(points(10, seed=2), batch_size=4)
    printed = []
    for _ in range(3):
        first, _ = next(iter(train))
        printed.append(model(first).sum().item())
        for x, y in train:
            optimizer.zero_grad()
            F.mse_loss(model(x), y, reduction="sum").div(10).backward()
            optimizer.step()
        for i, (x, y) in enumerate(valid):
            printed.append(F.mse_loss(model(x), y).item())
            if i == 1:
                break
    return ends(model), printed


@loop()
def one_function_for_training_and_evaluation() -> Values:
    model = net()
    optimizer = sgd(model)
    train, valid = DataLoader(points(), batch_size=7), DataLoader(points(10, seed=2), batch_size=7)
    printed = []

    def run(loader: DataLoader[Any], is_training: bool) -> float:
        model.train(is_training)
        total = 0.0
        with torch.set_grad_enabled(is_training):
            for x, y in loader:
                loss = F.mse_loss(model(x), y)
                if is_training:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                total += loss.item()
        return total / len(loader)

    for _ in range(3):
        printed += [run(train, True), run(valid, False), run(train, False)]
    return ends(model), printed


# Losses ---------------------------------------------------------------------------------------------------------------


def with_loss(criterion: Callable[[Tensor, Tensor], Tensor], lr: float = 0.1, labels: bool = False) -> Values:
    model = net(3 if labels else 1)
    loader = DataLoader(labelled() if labels else points(), batch_size=7, shuffle=True)
    printed = fit(model, sgd(model, lr), loader, criterion)
    return ends(model), printed


@loop()
def class_weights() -> Values:
    return with_loss(nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])), labels=True)


@loop()
def ignored_labels() -> Values:
    return with_loss(nn.CrossEntropyLoss(ignore_index=1), labels=True)


@loop()
def label_smoothing() -> Values:
    return with_loss(nn.CrossEntropyLoss(label_smoothing=0.1), labels=True)


@loop()
def smoothing_with_weights_and_ignored_labels() -> Values:
    weight = torch.tensor([0.2, 1.0, 3.0])
    return with_loss(nn.CrossEntropyLoss(weight, ignore_index=1, label_smoothing=0.1), labels=True)


@loop()
def sum_over_the_batch_size() -> Values:
    return with_loss(lambda guess, y: F.mse_loss(guess, y, reduction="sum") / len(y))


@loop()
def sum_alone() -> Values:
    return with_loss(nn.MSELoss(reduction="sum"), lr=0.01)


@loop()
def sum_over_fixed_points() -> Values:
    """Beside the batch a loss has a term over points that never change, as networks that know their physics have it."""
    model = net()
    optimizer = sgd(model, 0.02)
    corners = noise(11, 5)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) + 0.1 * (model(corners) ** 2).sum() + 0.1 * (model(corners) ** 4).mean()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def sum_over_a_number_like_a_part() -> Values:
    model = net()
    loader = DataLoader(points(24), batch_size=6)  # 3 is as many as a rank of 2 has, 2 of 3
    printed = fit(model, sgd(model, 0.02), loader, lambda guess, y: F.mse_loss(guess, y, reduction="sum") / 3)
    printed += fit(model, sgd(model, 0.02), loader, lambda guess, y: F.mse_loss(guess, y, reduction="sum") / 2)
    return ends(model), printed


@loop()
def mean_by_hand() -> Values:
    return with_loss(lambda guess, y: F.mse_loss(guess, y, reduction="none").mean())


@loop()
def mean_of_sums_over_features() -> Values:
    return with_loss(lambda guess, y: ((guess - y) ** 2 + guess.abs()).sum(dim=1).mean())


@loop(is_split=False)  # it could be, but its graph does not show it
def sum_of_means_over_the_batch() -> Values:
    return with_loss(lambda guess, y: ((guess - y) ** 2).mean(dim=0).sum())


@loop(is_split=False)  # it could be, but its graph does not show it
def mean_of_a_stack_of_losses() -> Values:
    return with_loss(lambda guess, y: torch.stack([F.mse_loss(g, t) for g, t in zip(guess, y, strict=True)]).mean())


@loop(is_split=False)  # it could be, but its graph does not show it
def sum_of_a_list_over_its_length() -> Values:
    def criterion(guess: Tensor, y: Tensor) -> Tensor:
        losses = [F.mse_loss(g, t) for g, t in zip(guess, y, strict=True)]
        return sum(losses) / len(losses)

    return with_loss(criterion)


@loop()
def weighted_samples() -> Values:
    def criterion(guess: Tensor, y: Tensor) -> Tensor:
        weight = y.abs() + 0.1
        return (weight * (guess - y) ** 2).sum() / weight.sum()

    return with_loss(criterion)


@loop()
def penalty_added_to_a_mean() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) + 0.01 * sum(p.abs().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(shows_parts=True)
def penalty_added_to_a_sum() -> Values:
    model = net()
    optimizer = sgd(model, 0.01)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y, reduction="sum")
            for p in model.parameters():
                loss = loss + 0.1 * p.norm() + 0.1 * p.pow(2).sum()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mu, self.logvar, self.decoder = net(6), nn.Linear(6, 2), nn.Linear(6, 2), net(5, 2)

    def forward(self, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.encoder(x))
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        return self.decoder(mu + torch.exp(0.5 * logvar) * eps), mu, logvar


def with_vae(reconstruction: Callable[[Tensor, Tensor], Tensor], lr: float) -> Values:
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    data = TensorDataset(points().tensors[0].sigmoid(), noise(26, 2))
    printed = []
    for _ in range(2):
        for x, eps in DataLoader(data, batch_size=7, shuffle=True):
            optimizer.zero_grad()
            output, mu, logvar = model(x, eps)
            kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = reconstruction(output, x) + kl
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(shows_parts=True)
def vae_with_a_mean_and_a_sum() -> Values:
    return with_vae(F.mse_loss, 1e-2)


@loop()
def vae_with_two_sums() -> Values:
    return with_vae(lambda guess, x: F.binary_cross_entropy(guess.sigmoid(), x, reduction="sum"), 1e-2)


@loop()
def two_tasks() -> Values:
    body, first, second = net(6), nn.Linear(6, 1), nn.Linear(6, 3)
    model = nn.ModuleList([body, first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(*points().tensors, labelled().tensors[1])
    printed = []
    for _ in range(2):
        for x, y, label in DataLoader(data, batch_size=7):
            optimizer.zero_grad()
            hidden = torch.relu(body(x))
            loss = F.mse_loss(first(hidden), y) + 0.5 * F.cross_entropy(second(hidden), label)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def parts_of_the_loss_printed() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            guess = model(x)
            near, flat = F.mse_loss(guess, y), guess.abs().mean()
            loss = near + 0.1 * flat
            loss.backward()
            optimizer.step()
            printed += [loss.item(), near.item(), flat.item()]
    return ends(model), printed


@loop()
def triplets() -> Values:
    model = net(4)
    optimizer = sgd(model)
    criterion = nn.TripletMarginLoss(margin=1.0)
    data = TensorDataset(*(noise(26, 5, seed=seed) for seed in (5, 6, 7)))
    printed = []
    for _ in range(2):
        for anchor, positive, negative in DataLoader(data, batch_size=7):
            optimizer.zero_grad()
            loss = criterion(model(anchor), model(positive), model(negative))
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def criterion_after_criterion() -> Values:
    model = net(2)
    optimizer = sgd(model, 0.05)
    sign = lambda y: torch.where(y > 0, 1.0, -1.0).squeeze(1)  # noqa: E731
    criteria: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda guess, y: nn.L1Loss()(guess, y.expand(-1, 2)),
        lambda guess, y: nn.SmoothL1Loss()(guess, y.expand(-1, 2)),
        lambda guess, y: nn.HuberLoss(delta=0.5)(guess, y.expand(-1, 2)),
        lambda guess, y: nn.BCELoss()(guess.sigmoid(), y.expand(-1, 2).sigmoid()),
        lambda guess, y: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))(guess, y.expand(-1, 2).sigmoid()),
        lambda guess, y: nn.NLLLoss()(guess.log_softmax(1), (y > 0).long().squeeze(1)),
        lambda guess, y: nn.KLDivLoss(reduction="batchmean")(guess.log_softmax(1), torch.cat([y, -y], 1).softmax(1)),
        lambda guess, y: nn.PoissonNLLLoss()(guess[:, :1], y.exp()),
        lambda guess, y: nn.GaussianNLLLoss()(guess[:, :1], y, guess[:, 1:].exp()),
        lambda guess, y: nn.SoftMarginLoss()(guess[:, 0], sign(y)),
        lambda guess, y: nn.MultiMarginLoss()(guess, (y > 0).long().squeeze(1)),
        lambda guess, y: nn.MarginRankingLoss(margin=0.1)(guess[:, 0], guess[:, 1], sign(y)),
        lambda guess, y: nn.HingeEmbeddingLoss()(guess[:, 0], sign(y)),
        lambda guess, y: nn.CosineEmbeddingLoss()(guess, torch.cat([y, -y], 1), sign(y)),
        lambda guess, y: 1 - F.cosine_similarity(guess, y.expand(-1, 2)).mean(),
        lambda guess, y: (guess - y).norm(dim=1).mean(),
        lambda guess, y: torch.sqrt(((guess - y) ** 2).sum(1) + 1e-6).mean(),
        lambda guess, y: -(guess.log_softmax(1)[:, 0] * y.squeeze(1)).mean(),
    ]
    printed = []
    batches = itertools.chain.from_iterable(DataLoader(points(21), batch_size=7) for _ in itertools.count())
    for criterion, (x, y) in zip(criteria, batches, strict=False):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


# What is printed ------------------------------------------------------------------------------------------------------


@loop()
def loss_read_before_and_after() -> Values:
    model = net()
    optimizer = sgd(model)
    before, after = [], []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            before.append(loss.item())
            loss.backward()
            optimizer.step()
            after.append(loss.item())
    return ends(model), after


@loop()
def running_mean() -> Values:
    model = net()
    optimizer = sgd(model)
    printed = []
    for _ in range(3):
        total, seen = 0.0, 0
        for x, y in DataLoader(points(24), batch_size=6):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
            seen += len(x)
        printed.append(total / seen)
    return ends(model), printed[1:]  # in the first epoch the first batch is whole, and counts more than the others


@loop()
def losses_kept_in_a_list() -> Values:
    model = net()
    optimizer = sgd(model)
    losses = []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return ends(model), torch.stack(losses).tolist()


# Whole: the loss is no sum over samples, or there is nothing to cut ---------------------------------------------------


@loop(is_split=False)
def root_of_a_mean() -> Values:
    return with_loss(lambda guess, y: torch.sqrt(F.mse_loss(guess, y)))


@loop(is_split=False)
def logarithm_of_a_mean() -> Values:
    return with_loss(lambda guess, y: torch.log(F.mse_loss(guess, y) + 0.1))


@loop(is_split=False)
def product_of_two_losses() -> Values:
    return with_loss(lambda guess, y: F.mse_loss(guess, y) * F.l1_loss(guess, y))


@loop(is_split=False)
def maximum_over_the_batch() -> Values:
    return with_loss(lambda guess, y: (guess - y).abs().max())


@loop(is_split=False)
def centred_by_the_batch() -> Values:
    return with_loss(lambda guess, y: torch.tanh(guess - guess.mean(0) - y).pow(2).mean())


def with_pairs(criterion: Callable[[Tensor, Tensor], Tensor]) -> Values:
    model = net(4)
    optimizer = sgd(model)  # Adam would make steps of what is left of gradients that cancel out
    x = points().tensors[0]
    printed = []
    for _ in range(2):
        for a, b in DataLoader(TensorDataset(x, x + 0.1 * noise(26, 5)), batch_size=7, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(a), model(b))
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def contrastive() -> Values:
    def criterion(a: Tensor, b: Tensor) -> Tensor:
        logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.5
        labels = torch.arange(len(a))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return with_pairs(criterion)


@loop(is_split=False)
def simclr() -> Values:
    def criterion(a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.cat([a, b]), dim=1)
        likeness = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(likeness, torch.arange(len(z)).roll(len(a)))

    return with_pairs(criterion)


@loop(is_split=False)
def variance_and_covariance() -> Values:
    def criterion(a: Tensor, b: Tensor) -> Tensor:
        loss = F.mse_loss(a, b)
        for z in (a, b):
            z = z - z.mean(dim=0)
            covariance = z.T @ z / (len(z) - 1)
            loss = loss + F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean()
            loss = loss + 0.04 * (covariance - covariance.diag().diag()).pow(2).sum() / 4
        return loss

    return with_pairs(criterion)


@loop(is_split=False)
def hardest_triplets() -> Values:
    def criterion(z: Tensor, labels: Tensor) -> Tensor:
        distances = torch.cdist(z, z)
        same = labels[:, None] == labels[None]
        furthest = distances.masked_fill(~same, 0.0).max(1).values
        nearest = distances.masked_fill(same, 1e9).min(1).values
        return F.relu(furthest - nearest + 1.0).mean()

    model = net(4)
    printed = fit(model, sgd(model, 0.02), DataLoader(labelled(), batch_size=13, shuffle=True), criterion)
    return ends(model), printed


@loop(is_split=False)
def second_order_inner_step() -> Values:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(*points().tensors, *points(seed=2).tensors)
    printed = []
    for _ in range(2):
        for x, y, u, v in DataLoader(data, batch_size=7):
            weights = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, weights, (x,)), y)
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
            loss = F.mse_loss(functional_call(model, fast, (u,)), v)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def full_batch() -> Values:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = points().tensors
    printed = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 0.01 * sum(p.abs().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def full_batch_of_a_sum() -> Values:
    model = net()
    optimizer = sgd(model, 0.01)
    x, y = points().tensors
    printed = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y, reduction="sum")
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def list_of_batches() -> Values:
    model = net()
    printed = fit(model, sgd(model), list(DataLoader(points(), batch_size=7, shuffle=True)))
    return ends(model), printed


@loop(is_split=False)
def batches_that_nobody_can_look_into() -> Values:
    model = net()
    optimizer = sgd(model)
    rows = list(points())
    data = Stream([Batch(rows[start : start + 7]) for start in range(0, 26, 7)])
    printed = []
    for _ in range(2):
        for batch in DataLoader(data, batch_size=None):
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch.x), batch.y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(may_refuse=True)
def root_of_a_mean_from_the_third_step_on() -> Values:
    model = net()
    optimizer = sgd(model)
    step = 0
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=7):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            (loss if step < 2 else loss.sqrt()).backward()
            optimizer.step()
            step += 1
    return ends(model), []


# What a second reading found ------------------------------------------------------------------------------------------


@loop()
def steps_along_the_gradients_of_inputs() -> Values:
    model = net()
    optimizer = sgd(model)
    for x, y in DataLoader(points(), batch_size=7):
        x.requires_grad_()
        F.mse_loss(model(x), y).backward()
        worse = (x + 0.5 * x.grad).detach()
        optimizer.zero_grad()
        F.mse_loss(model(worse), y).backward()
        optimizer.step()
    return ends(model), []


@loop()
def two_sums_that_are_divided_otherwise() -> Values:
    one, other = net(), net()
    first, second = sgd(one, 0.05), sgd(other, 0.05)
    for x, y in DataLoader(points(), batch_size=7):
        first.zero_grad()
        (F.mse_loss(one(x), y, reduction="sum") / len(x)).backward()
        first.step()
        second.zero_grad()
        (F.mse_loss(other(x), y, reduction="sum") / 100).backward()
        second.step()
    return [*ends(one), *ends(other)], []


@loop()
def six_optimizers() -> Values:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01 * (place + 1) / 3) for place, layer in enumerate(model)]
    for x, y in DataLoader(points(), batch_size=7):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(model(x), y.expand(-1, 5)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return ends(model), []


@loop(is_split=False)
def gradients_clamped_by_hooks() -> Values:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    printed = fit(model, sgd(model), DataLoader(points(), batch_size=7))
    return ends(model), printed


# What a third reading found -------------------------------------------------------------------------------------------


@loop()
def mean_times_the_number_of_samples() -> Values:
    model = net()
    optimizer, printed = sgd(model), []
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=8):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * len(x) / 26
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(shows_parts=True)
def weight_decay_over_the_number_of_samples() -> Values:
    model = net()
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(points(), batch_size=8):
        optimizer.zero_grad()
        decay = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        loss = F.mse_loss(model(x), y) + 0.1 * decay / (2 * len(x))
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop()
def sum_with_an_annealed_weight() -> Values:
    """What it is divided by is 10, 20, 30: whole numbers, as counts of a mask are, and a half of another."""
    model = net()
    optimizer, printed = sgd(model), []
    for epoch in range(3):
        for x, y in DataLoader(points(), batch_size=8):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y, reduction="sum") / (10 * (3 - epoch))
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def two_sums_of_which_one_is_warmed_up() -> Values:
    model = net()
    optimizer, printed = sgd(model), []
    for epoch in range(3):
        for x, y in DataLoader(points(), batch_size=8):
            optimizer.zero_grad()
            out = model(x)
            loss = (F.mse_loss(out, y, reduction="sum") + epoch / 10 * out.square().sum()) / len(x)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def mixed_with_the_batch_backwards() -> Values:
    model = net()
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(points(48), batch_size=16):
        optimizer.zero_grad()
        loss = F.mse_loss(model(0.7 * x + 0.3 * x.flip(0)), 0.7 * y + 0.3 * y.flip(0))
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def each_sample_beside_the_one_before() -> Values:
    model = net()
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(points(48), batch_size=16):
        optimizer.zero_grad()
        before = torch.arange(len(x), device="cpu").roll(1)
        loss = F.mse_loss(model(x), y - y[before] / 2)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def batches_in_another_order() -> Values:
    """Samples keep what belongs to them; an order of whole numbers is not followed, so it is whole, and right."""
    model = net(3)
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(labelled(48), batch_size=16):
        optimizer.zero_grad()
        order = y.argsort(stable=True)
        loss = F.cross_entropy(model(x.flip(0)), y.flip(0)) + F.cross_entropy(model(x), y[order][order.argsort()])
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_exact=False)
def mixed_with_samples_that_are_drawn() -> Values:
    """Mixup; which samples meet is noise, and each rank draws its own."""
    model = net()
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(points(48), batch_size=16):
        optimizer.zero_grad()
        drawn = torch.randperm(len(x), device="cpu")
        loss = F.mse_loss(model(0.7 * x + 0.3 * x[drawn]), 0.7 * y + 0.3 * y[drawn])
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


def with_a_memory(reduction: str, width: int = 1) -> Values:
    """Each batch is joined with as many samples that the program has kept, as in continual learning."""
    model, kept = net(width), points(16, seed=7).tensors
    optimizer, printed = sgd(model, 0.01), []
    for x, y in DataLoader(points(48), batch_size=8):
        optimizer.zero_grad()
        out = model(torch.cat([x, kept[0][:8]]))
        loss = F.mse_loss(out, torch.cat([y, kept[1][:8]]).expand_as(out), reduction=reduction)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def a_mean_with_a_memory() -> Values:
    return with_a_memory("mean")


@loop(is_split=False)
def a_sum_with_a_memory() -> Values:
    return with_a_memory("sum", 2)


@loop()
def a_layer_that_is_trained_later() -> Values:
    """As many numbers as a part of two ranks has samples; the graph has other operations from then on."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, printed = sgd(model), []
    model[0].requires_grad_(False)
    for epoch in range(3):
        model[0].requires_grad_(epoch > 0)
        for x, y in DataLoader(points(48), batch_size=16):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def a_rare_mask_with_a_least_count() -> Values:
    """Only one part of each batch has samples of it; the other divides by a 1 that counts none."""
    x, y = labelled(48).tensors
    x, y = x[x[:, 0].argsort()], y[x[:, 0].argsort()]
    model = net(3)
    optimizer, printed = sgd(model), []
    for batch, labels in DataLoader(TensorDataset(x, y), batch_size=16):
        for mask in (batch[:, 0] > 1.0, batch[:, 0] < -0.9):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(batch), labels, reduction="none") * mask.double()
            loss = losses.sum() / mask.double().sum().clamp(min=1)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    return ends(model), printed


@loop()
def called_again_from_another_line() -> Values:
    model = net()
    optimizer, printed = sgd(model, 0.05), []

    def batches() -> Iterator[Any]:
        yield from DataLoader(points(48), batch_size=16)

    def train() -> None:
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y, reduction="sum") / (2 * len(x))
            loss.backward()
            optimizer.step()
            printed.append(loss.item())

    def phase() -> None:
        train()

    phase()
    phase()
    return ends(model), printed


@loop()
def an_optimizer_for_each_phase() -> Values:
    model = net()
    kept, printed = [], []  # the first one lives on
    for rate in (0.1, 0.01, 0.05):
        optimizer = sgd(model, rate)
        kept += [optimizer] if rate == 0.1 else []
        printed += fit(model, optimizer, DataLoader(points(), batch_size=8), epochs=1)
    return ends(model), printed


@loop()
def latents_of_each_batch() -> Values:
    model = nn.Linear(3, 5)
    optimizer = sgd(model)
    for x, _ in DataLoader(points(), batch_size=8):
        latents = nn.Parameter(torch.zeros(len(x), 3))
        inner = torch.optim.SGD([latents], lr=0.5)
        for _ in range(3):
            inner.zero_grad()
            F.mse_loss(model(latents), x, reduction="sum").backward()
            inner.step()
        optimizer.zero_grad()
        F.mse_loss(model(latents.detach()), x).backward()
        optimizer.step()
    return ends(model), []


@loop()
def gradients_by_torch_func_beside_it() -> Values:
    model = net()
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(points(), batch_size=8):
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        looked = torch.func.grad(lambda w: functional_call(model, w, noise(4, 5)).square().mean())(weights)
        printed.append(sum(each.square().sum().item() for each in looked.values()))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return ends(model), printed


class Centred(nn.Module):
    """Keeps a mean of what it has seen, in a buffer that is another tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("centre", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) - self.centre
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return out


@loop()
def buffer_that_is_assigned_anew() -> Values:
    model = Centred()
    printed = fit(model, sgd(model), DataLoader(points(24), batch_size=8))
    return ends(model), printed


@loop(is_split=False)
def pairs_of_two_classes() -> Values:
    model = net()
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(labelled(40, classes=2), batch_size=10):
        optimizer.zero_grad()
        scores = model(x).squeeze(1)
        loss = F.relu(1 - scores[y == 1][:, None] + scores[y == 0][None]).mean()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def means_of_each_class() -> Values:
    model = net(4)
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(labelled(40), batch_size=10):
        optimizer.zero_grad()
        out = model(x)
        means = torch.stack([out[y == each].mean(0) for each in range(3)])
        loss = F.cross_entropy(-torch.cdist(out, means), y)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop(is_split=False)
def sums_of_each_class_by_their_index() -> Values:
    model = net(4)
    optimizer = sgd(model)
    for x, y in DataLoader(labelled(40), batch_size=10):
        optimizer.zero_grad()
        out = model(x)
        sums = torch.zeros(3, 4).index_add(0, y, out)
        (F.mse_loss(out, sums[y])).backward()
        optimizer.step()
    return ends(model), []


@loop(is_split=False)
def product_along_the_batch_with_targets() -> Values:
    model = net(4)
    optimizer = sgd(model)
    for x, _ in DataLoader(points(40), batch_size=10):
        optimizer.zero_grad()
        (x.T @ model(x)).square().mean().backward()
        optimizer.step()
    return ends(model), []


# Beside a memory: samples that the program has kept, the same with each part of a batch -------------------------------


def beside_a_memory(loss_of: Callable[..., Tensor], batch_size: int = 8) -> Values:
    """Args: loss_of: Called with the model, the batch, the memory, and the number of the step."""
    model, kept = net(), points(16, seed=7).tensors
    optimizer, printed = sgd(model, 0.01), []
    for step, (x, y) in enumerate(DataLoader(points(48), batch_size=batch_size)):
        optimizer.zero_grad()
        loss = loss_of(model, x, y, *kept, step)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


@loop()
def a_memory_that_is_cut_off_again() -> Values:
    return beside_a_memory(
        lambda model, x, y, kept, its, step: F.mse_loss(model(torch.cat([kept[:8], x]))[-len(x) :], y)
    )


@loop()
def means_of_samples_and_of_a_memory() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, kept: Tensor, its: Tensor, step: int) -> Tensor:
        out = model(torch.cat([x, kept[:8]]))
        each = F.mse_loss(out, torch.cat([y, its[:8]]), reduction="none")
        return each[: len(x)].mean() + 0.5 * each[len(x) :].mean()

    return beside_a_memory(loss_of)


@loop(shows_parts=True)
def sums_of_samples_and_of_a_memory() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, kept: Tensor, its: Tensor, step: int) -> Tensor:
        of_samples, of_memory = model(torch.cat([x, kept[:8]])).split([len(x), 8])
        total = F.mse_loss(of_samples, y, reduction="sum")
        return total + F.mse_loss(of_memory, its[:8], reduction="sum")

    return beside_a_memory(loss_of, 16)


@loop()
def a_mean_and_a_sum_over_a_memory_by_itself() -> Values:
    return beside_a_memory(
        lambda model, x, y, kept, its, step: F.mse_loss(model(x), y) + (model(kept[:8]) - its[:8]).square().sum(), 16
    )


@loop()
def a_mean_and_a_sum_over_a_grid() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, *others: Any) -> Tensor:
        grid = torch.linspace(-1, 1, 20).reshape(4, 5)
        return F.mse_loss(model(x), y) + 0.1 * model(grid).square().sum()

    return beside_a_memory(loss_of)


@loop(is_split=False)
def a_memory_of_as_many_samples_as_the_batch() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, kept: Tensor, its: Tensor, step: int) -> Tensor:
        return F.mse_loss(model(torch.cat([x, kept[: len(x)]])), torch.cat([y, its[: len(x)]]))

    return beside_a_memory(loss_of)


@loop(may_refuse=True)
def rows_of_a_memory_by_themselves() -> Values:
    """Whole batches have 16 of them, and each part has the first ones."""
    return beside_a_memory(
        lambda model, x, y, kept, its, step: F.mse_loss(model(x), y) + F.mse_loss(model(kept[: len(x)]), its[: len(x)]),
        16,
    )


@loop(may_refuse=True)
def a_memory_from_the_second_step_on() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, kept: Tensor, its: Tensor, step: int) -> Tensor:
        kept, its = kept[: 8 * (step > 0)], its[: 8 * (step > 0)]
        return F.mse_loss(model(torch.cat([x, kept])), torch.cat([y, its]))

    return beside_a_memory(loss_of)


@loop(may_refuse=True)
def the_batch_before_beside_each() -> Values:
    seen: list[tuple[Tensor, Tensor]] = []

    def loss_of(model: nn.Module, x: Tensor, y: Tensor, *others: Any) -> Tensor:
        xs, ys = (torch.cat([one, other]) for one, other in zip((x, y), seen.pop(), strict=True)) if seen else (x, y)
        seen.append((x, y))
        return F.mse_loss(model(xs), ys)

    return beside_a_memory(loss_of)


@loop(is_split=False)
def samples_written_into_a_memory() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, kept: Tensor, its: Tensor, step: int) -> Tensor:
        xs, ys = kept.clone(), its.clone()
        xs[: len(x)], ys[: len(x)] = x, y
        return F.mse_loss(model(xs), ys)

    return beside_a_memory(loss_of)


@loop(is_split=False)
def samples_copied_into_a_queue() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, kept: Tensor, its: Tensor, step: int) -> Tensor:
        places = torch.arange(len(x))
        return F.mse_loss(model(kept.index_copy(0, places, x)), its.index_copy(0, places, y))

    return beside_a_memory(loss_of)


@loop(is_split=False)
def batches_padded_to_a_number_of_samples() -> Values:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor, *others: Any) -> Tensor:
        xs, ys = F.pad(x, (0, 0, 0, 12 - len(x))), torch.cat([y, torch.zeros(12 - len(y), 1)])
        return F.mse_loss(model(xs), ys)

    return beside_a_memory(loss_of)


class WithPrototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.layers = nn.Parameter(torch.ones(3, 5)), net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.cat([x, self.prototypes]))
        return out


@loop(is_split=False)
def prototypes_joined_with_samples() -> Values:
    model = WithPrototypes()
    optimizer, printed = sgd(model, 0.01), []
    for x, _ in DataLoader(points(48), batch_size=8):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed
