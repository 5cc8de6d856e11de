"""Programs that any strategy must train like one process, for strategies of other packages too. Runs in test processes.

Each program is a small training with something that real ones have: an optimizer made before `prepare`, windows of
accumulation, clipping, tied and frozen parameters, two models, a checkpoint that others go on from. `check` runs it
with a strategy in several ranks and in one process on the same samples, and compares what both have trained and told.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nbaccel.base.values import frozen
from nbaccel.testing.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from nbaccel.train.accelerator import Accelerator

__all__ = ["PROGRAMS", "ConformanceProgram", "ProgramResult", "Setting", "check"]

_STEPS = 7
_BATCH = 8
_WORDS = 11  # odd: no number of ranks divides it
_PARTS = ((0, 2), (2, 4), (4, _STEPS))
"""Parts of a training that goes on in other numbers of ranks: each one's first step, and the one after its last."""


_Result = tuple[dict[str, Any], Any]
"""What a program has trained, in rank 0, and facts that every rank must tell like one process."""


@frozen
class Setting:
    """The way in which one process of a program trains: its Accelerator, and the number of ranks.

    Args:
        part: Of a training that goes on in other numbers of ranks, the one that is made here.
        folder: Where each part of it saves; empty in one process, which trains in one go.
        is_launched: This process launches the ranks, and trains nothing itself.
    """

    ranks: int
    options: Mapping[str, Any]
    part: int = 0
    folder: str = ""
    is_launched: bool = False

    def accelerator(self, **options: Any) -> Accelerator:
        """Return the Accelerator of this process, with random numbers that start alike in every setting."""
        import torch

        from nbaccel.train.accelerator import Accelerator

        made = Accelerator(**{"cpu": True, **self.options, **options})
        torch.manual_seed(7 + made.process_index)  # rank 0's weights are those of one process
        return made

    def loader(self, samples: int = _STEPS * _BATCH) -> Any:
        """Return a loader over sequences of words; `_BATCH` of them are one step of all ranks together."""
        import torch
        from torch.utils.data import DataLoader

        words = torch.randint(0, _WORDS, (samples, 5), generator=torch.Generator().manual_seed(1), device="cpu")
        return DataLoader(words, batch_size=_BATCH // self.ranks)  # type: ignore[arg-type]


@frozen
class ConformanceProgram:
    """A training, and how far its numbers may be from those of one process.

    Args:
        moves: It goes on in one rank, and then in twice as many, from what it has saved.
        is_launched: It runs in one process, like a notebook, which launches the ranks.
    """

    train: Callable[[Setting], _Result]
    limit: float
    moves: bool = False
    is_launched: bool = False


@frozen
class ProgramResult:
    """A result of `check`: the largest difference of a trained number, and what else differs, if anything does.

    Attributes:
        is_within: Both are as they must be.
    """

    program: str
    largest: float
    limit: float
    other: str = ""

    @property
    def is_within(self) -> bool:
        return self.largest <= self.limit and not self.other

    def __str__(self) -> str:
        said = f"{self.program}: differs by {self.largest:.1e}, limit {self.limit:.0e}"
        return f"{said}; {self.other}" if self.other else said


def check(
    strategy: str,
    programs: Iterable[str] | None = None,
    *,
    ranks: int = 2,
    options: Callable[[], Mapping[str, Any]] = dict,
    timeout_s: float = 180,
) -> list[ProgramResult]:
    """Train `programs` with `strategy` one after the other, and in one process; return how far apart the two are.

    Args:
        programs: Names of `PROGRAMS`; by default all.
        ranks: That share each batch of 8.
        options: Makes more arguments for `Accelerator`, in each rank: a plugin, for example.

    Raises:
        RanksFailed: A program failed in a rank.
        TimeoutError: They were not done after `timeout_s`.

    Example:
        >>> from nbaccel.testing import conformance
        >>> [difference] = conformance.check("ddp", ["plain"])
        >>> difference.is_within
        True
    """
    chosen = list(PROGRAMS if programs is None else programs)
    forked = [name for name in chosen if not PROGRAMS[name].is_launched]
    moving = [name for name in forked if PROGRAMS[name].moves]

    def alone() -> dict[str, _Result]:
        return {name: _run(name, Setting(1, {})) for name in chosen}

    def shared(names: Iterable[str], ranks: int, **more: Any) -> dict[str, _Result]:
        return {name: _run(name, Setting(ranks, {"strategy": strategy, **options()}, **more)) for name in names}

    [wanted] = run_ranks(1, alone, timeout_s=timeout_s)
    got: dict[str, list[_Result]] = {}
    if launching := [name for name in chosen if name not in forked]:
        [launched] = run_ranks(1, partial(shared, launching, ranks, is_launched=True), timeout_s=timeout_s)
        got |= {name: [result] for name, result in launched.items()}
    with tempfile.TemporaryDirectory() as folder:
        for part, (names, number) in enumerate([(forked, ranks), (moving, 1), (moving, 2 * ranks)]):
            if names:
                train = partial(shared, names, number, part=part, folder=folder)
                by_rank = run_ranks(number, train, timeout_s=timeout_s)
                got |= {name: [results[name] for results in by_rank] for name in names}
    return [_compare(name, wanted[name], got[name]) for name in chosen]


def _run(program: str, setting: Setting) -> _Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of losses that are not finite on purpose, and of ranks that are new
        return PROGRAMS[program].train(setting)


def _compare(program: str, alone: _Result, by_rank: Sequence[_Result]) -> ProgramResult:
    limit = PROGRAMS[program].limit
    (wanted, wanted_facts), got = alone, by_rank[0][0]
    other = [] if wanted.keys() == got.keys() else [f"trained {sorted(got)}, wanted {sorted(wanted)}"]
    other += [
        f"rank {rank} told {facts}, one process {wanted_facts}"
        for rank, (_, facts) in enumerate(by_rank)
        if not _alike(facts, wanted_facts, limit)
    ]
    largest = max((float((wanted[name] - got[name]).abs().max()) for name in wanted if name in got), default=0.0)
    return ProgramResult(program, largest, limit, "; ".join(other))


def _alike(one: Any, other: Any, limit: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= max(1.0, abs(other)) * limit * 10
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_alike(a, b, limit) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# -- what is trained


def _language_model(tied: bool = False, dim: int = 8) -> Module:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            more: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
            return x + more

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(_WORDS, dim)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(dim, _WORDS, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, words: Tensor) -> Tensor:
            x = self.embed(words)
            for block in self.blocks:
                x = block(x)
            scores: Tensor = self.head(x)
            return scores

    return LanguageModel()


def _loss(model: Module, words: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def _trained(accelerator: Accelerator, *models: Module) -> dict[str, Any]:
    """Return the weights of all `models` in rank 0, and none in others. Collective."""
    trained: dict[str, Any] = {}
    for number, model in enumerate(models):
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            # On the host: a process that has received tensors of a device cannot fork ranks for it any more.
            trained |= {f"{number}.{name}": value.detach().cpu().clone().double() for name, value in state.items()}
    return trained


# -- programs


def _plain(setting: Setting) -> _Result:
    import torch

    accelerator = setting.accelerator()
    model = accelerator.prepare(_language_model())
    optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2), setting.loader())
    for words in loader:
        accelerator.backward(_loss(model, words))
        optimizer.step()
        optimizer.zero_grad()
    return _trained(accelerator, model), None


def _optimizer_first(setting: Setting) -> _Result:
    import torch

    accelerator = setting.accelerator()
    model = _language_model()
    groups = [
        {"params": [weight for weight in model.parameters() if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in model.parameters() if weight.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    optimizer = torch.optim.Adagrad(groups, lr=1e-2)  # which has state at its birth
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * setting.ranks, 0.5)
    # In any order, and in several calls.
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    loader, model = accelerator.prepare(setting.loader(), model)
    for words in loader:
        accelerator.backward(_loss(model, words))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return _trained(accelerator, model), [group["lr"] for group in optimizer.param_groups]


def _accumulation(setting: Setting) -> _Result:
    import torch

    accelerator = setting.accelerator(gradient_accumulation_steps=3)  # of 7 batches: 3 + 3 + 1
    model = _language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    for words in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, words))
            optimizer.step()
            optimizer.zero_grad()
    return _trained(accelerator, model), None


def _clipping(setting: Setting) -> _Result:
    import torch

    accelerator = setting.accelerator()
    model = _language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    norms = []
    for words in loader:
        accelerator.backward(_loss(model, words))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        accelerator.clip_grad_value_(model.parameters(), 0.05)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return _trained(accelerator, model), norms


def _half(precision: str) -> Callable[[Setting], _Result]:
    def train(setting: Setting) -> _Result:
        import torch

        from nbaccel.train.step.kwargs_handlers import GradScalerKwargs

        accelerator = setting.accelerator(
            mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
        )
        model = _language_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # Adam's first steps would amplify rounding
        model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
        skipped = []
        for number, words in enumerate(loader):
            loss = _loss(model, words)
            if precision == "fp16" and number == 2 and accelerator.is_main_process:
                loss = loss * float("inf")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(bool(optimizer.step_was_skipped))
        scale = [accelerator.scaler.get_scale()] if accelerator.scaler is not None else []
        return _trained(accelerator, model), [skipped, scale]

    return train


def _not_finite(setting: Setting) -> _Result:
    import torch

    accelerator = setting.accelerator(on_nan="skip")
    model = _language_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), setting.loader())
    skipped = []
    for number, words in enumerate(loader):
        loss = _loss(model, words)
        accelerator.backward(loss * float("nan") if number == 3 and accelerator.is_last_process else loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(bool(optimizer.step_was_skipped))
    return _trained(accelerator, model), skipped


def _frozen_and_tied(setting: Setting) -> _Result:
    import torch

    accelerator = setting.accelerator()
    model = _language_model(tied=True)
    for name, weight in model.named_parameters():
        weight.requires_grad_("up" not in name)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    for words in loader:
        accelerator.backward(_loss(model, words))
        optimizer.step()
        optimizer.zero_grad()
    trained = accelerator.unwrap_model(model).named_parameters()
    return _trained(accelerator, model), sorted(name for name, weight in trained if weight.requires_grad)


def _statistics(setting: Setting) -> _Result:
    """Train with running statistics, which are rank 0's, and evaluate an uneven number of samples."""
    import torch
    from torch import nn

    accelerator = setting.accelerator()
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # statistics of a rank's batches are not those of all
    numbers = torch.randn(48, 4, generator=torch.Generator().manual_seed(2), device="cpu")
    loader: Any = torch.utils.data.DataLoader(numbers, batch_size=_BATCH // setting.ranks)  # type: ignore[arg-type]
    held_out: Any = torch.utils.data.DataLoader(range(13), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs = model(torch.ones(2, 4, device="cpu"))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in held_out])
    spread = accelerator.gather(outputs[:1]).std(unbiased=False).item()
    return {}, [sorted(seen.tolist()), spread]


def _two_models(setting: Setting) -> _Result:
    import torch
    from torch import nn

    accelerator = setting.accelerator()
    maker, judge = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (maker, judge)]
    maker, judge, first, second, loader = accelerator.prepare(maker, judge, *optimizers, setting.loader())
    for words in loader:
        real = words.float()
        accelerator.backward(judge(maker(real).detach()).sigmoid().mean() - judge(real).sigmoid().mean())
        second.step()
        second.zero_grad()
        accelerator.backward(-judge(maker(real)).sigmoid().mean())
        first.step()
        first.zero_grad()
        second.zero_grad()
    return _trained(accelerator, maker, judge), None


def _unused(setting: Setting) -> _Result:
    import torch

    from nbaccel.train.step.kwargs_handlers import DistributedDataParallelKwargs

    accelerator = setting.accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    model = _language_model()
    model.spare = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    for words in loader:
        accelerator.backward(_loss(model, words))
        optimizer.step()
        optimizer.zero_grad()
    return _trained(accelerator, model), None


def _adapters(setting: Setting) -> _Result:
    """Train low-rank adapters beside frozen weights, with activations that are computed again in the backward."""
    import torch
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.into = nn.Linear(base.in_features, 2, bias=False)
            self.out = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            adapted: Tensor = self.base(x) + self.out(self.into(x))
            return adapted

    accelerator = setting.accelerator()
    model = _language_model().requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    accelerator.gradient_checkpointing(model)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    for words in loader:
        accelerator.backward(_loss(model, words))
        optimizer.step()
        optimizer.zero_grad()
    return _trained(accelerator, model), None


def _out_of_memory(setting: Setting) -> _Result:
    """Train by `forward_backward`, where the last rank runs out of memory in a forward, and later in a backward."""
    import torch

    from nbaccel.testing.faults import Faults

    last = setting.ranks - 1
    faults = Faults().oom_at("output", rank=last, step=1).oom_at("backward", rank=last, step=4)
    accelerator = setting.accelerator(gradient_accumulation_steps=2)
    model = _language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    losses = []
    with faults, faults.in_model(model):
        for faults.step, words in enumerate(loader):
            with accelerator.accumulate(model):
                loss = accelerator.forward_backward(lambda part: _loss(model, part), words)
                losses.append(accelerator.reduce(loss, "mean").item())
                optimizer.step()
                optimizer.zero_grad()
    return _trained(accelerator, model), [losses, accelerator.is_last_process <= (not faults.pending)]


def _resumed(setting: Setting) -> _Result:
    """Train in parts, each of new processes, which go on within the epoch where the last part has saved."""
    import torch

    accelerator = setting.accelerator()
    torch.manual_seed(7 + setting.part)  # what is loaded is not what a part would begin with
    model = _language_model(tied=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # which has state at its birth
    model, optimizer, loader = accelerator.prepare(model, optimizer, setting.loader())
    first, end = _PARTS[setting.part] if setting.folder else (0, _STEPS)
    if first:
        accelerator.load_state(setting.folder)
    step = first
    for step, words in enumerate(loader, first + 1):
        accelerator.backward(_loss(model, words))
        optimizer.step()
        optimizer.zero_grad()
        if step == end < _STEPS:
            accelerator.save_state(setting.folder)
            break
    return _trained(accelerator, model), step


def _brought_back(setting: Setting) -> _Result:
    """Train objects of this process in ranks; they are trained here afterwards, as ``--out`` of a cell does it."""
    import torch
    from torch import nn

    from nbaccel.launching.api import launch
    from nbaccel.launching.launcher import default_launcher
    from nbaccel.namespace.install import install

    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(_WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, _WORDS, bias=False))
    model[3].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train() -> tuple[Any, Any]:
        accelerator = setting.accelerator()
        prepared, stepping, loader = accelerator.prepare(model, optimizer, setting.loader())
        for words in loader:
            accelerator.backward(_loss(prepared, words))
            stepping.step()
            stepping.zero_grad()
        return prepared, stepping

    names: dict[str, Any] = {"model": model, "optimizer": optimizer}
    before = [model, optimizer, *model.parameters()]
    if setting.is_launched:
        came = launch(train, setting.ranks, cpu=True).value
        default_launcher().close()
        install(dict(zip(names, came, strict=True)), names, {})
    else:
        train()
    kept = zip(before, [names["model"], names["optimizer"], *names["model"].parameters()], strict=True)
    trained = {name: value.detach().double() for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()["state"]
    trained |= {f"{number}.{name}": value.double() for number, each in moments.items() for name, value in each.items()}
    return trained, [all(one is other for one, other in kept), model[3].weight is model[0].weight]


_FP32, _HALF = 1e-5, 2e-2

PROGRAMS: Mapping[str, ConformanceProgram] = {
    "plain": ConformanceProgram(_plain, _FP32),
    "optimizer first": ConformanceProgram(_optimizer_first, _FP32),
    "accumulation": ConformanceProgram(_accumulation, _FP32),
    "clipping": ConformanceProgram(_clipping, _FP32),
    "fp16": ConformanceProgram(_half("fp16"), _HALF),
    "bf16": ConformanceProgram(_half("bf16"), _HALF),
    "not finite": ConformanceProgram(_not_finite, _FP32),
    "frozen and tied": ConformanceProgram(_frozen_and_tied, _FP32),
    "statistics": ConformanceProgram(_statistics, _FP32),
    "resumed": ConformanceProgram(_resumed, _FP32, moves=True),
    "two models": ConformanceProgram(_two_models, _FP32),
    "unused": ConformanceProgram(_unused, _FP32),
    "adapters": ConformanceProgram(_adapters, _FP32),
    "brought back": ConformanceProgram(_brought_back, _FP32, is_launched=True),
    "out of memory": ConformanceProgram(_out_of_memory, _FP32),
}
"""By name: what trains, and how far its numbers may be from those of one process."""
