"""Losses as users write them: what the terms say makes the gradient of the whole batch out of those of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nbaccel.train.raw_loop.sample_independence import obstacle_below
from nbaccel.train.raw_loop.terms import LossTerms, read

ROWS, PARTS = 8, (slice(0, 1), slice(1, 4), slice(4, 8))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        self.old = [parameter.detach() + 0.1 for parameter in self.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Batch:
    def __init__(self, rows: slice = slice(0, ROWS)) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, 5, generator=draw)[rows]
        self.y = torch.randn(ROWS, 4, generator=draw)[rows]
        self.probs = torch.rand(ROWS, 4, generator=draw).softmax(1)[rows]
        self.mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]] * 4)[rows]
        self.labels = torch.tensor([0, 3, 1, -100, 2, 1, -100, 0])[rows]
        self.kinds = torch.tensor([0, 3, 1, 2, 2, 1, 0, 0])[rows]
        self.images = torch.tensor([[[0, 1], [2, -100]]] * ROWS)[rows]
        self.signs = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1])[rows]
        self.rows = len(self.x)


CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
Loss = Callable[[Net, Batch], Tensor]


def l2(net: Net) -> Any:
    return sum(p.pow(2).sum() for p in net.parameters())


def ewc(net: Net) -> Any:
    return sum((2.0 * (p - old) ** 2).sum() for p, old in zip(net.parameters(), net.old, strict=True))


def fisher(net: Net) -> Any:
    return sum((old.abs() * (p - old) ** 2).sum() for p, old in zip(net.parameters(), net.old, strict=True))


def accumulated(net: Net, b: Batch) -> Tensor:
    loss, hidden = torch.zeros(()), net(b.x)
    for step in range(5):
        loss += F.mse_loss(hidden * step, b.y)
    return loss / 5


def dice(net: Net, b: Batch) -> Tensor:
    p = net(b.x).sigmoid()
    return 1 - ((2 * p * b.probs).sum(1) / (p.sum(1) + b.probs.sum(1))).mean()


LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda n, b: F.cross_entropy(n(b.x), b.labels),
    "cross_entropy sum": lambda n, b: F.cross_entropy(n(b.x), b.kinds, reduction="sum"),
    "cross_entropy sum / len": lambda n, b: F.cross_entropy(n(b.x), b.kinds, reduction="sum") / len(b.x),
    "cross_entropy none mean": lambda n, b: F.cross_entropy(n(b.x), b.kinds, reduction="none").mean(),
    "class weights": lambda n, b: F.cross_entropy(n(b.x), b.labels, weight=CLASS_WEIGHT),
    "label smoothing": lambda n, b: F.cross_entropy(n(b.x), b.labels, label_smoothing=0.2),
    "smoothing and weights": lambda n, b: F.cross_entropy(n(b.x), b.labels, weight=CLASS_WEIGHT, label_smoothing=0.2),
    "probabilities": lambda n, b: F.cross_entropy(n(b.x), b.probs),
    "probabilities and weights": lambda n, b: F.cross_entropy(n(b.x), b.probs, weight=CLASS_WEIGHT),
    "pixels": lambda n, b: F.cross_entropy(n(b.x)[:, :, None, None].repeat(1, 1, 2, 2), b.images),
    "nll by hand": lambda n, b: -n(b.x).log_softmax(1)[range(b.rows), b.kinds].mean(),
    "nll_loss": lambda n, b: F.nll_loss(n(b.x).log_softmax(-1), b.labels),
    "mse": lambda n, b: F.mse_loss(n(b.x), b.y),
    "mse sum": lambda n, b: F.mse_loss(n(b.x), b.y, reduction="sum"),
    "squares by hand": lambda n, b: ((n(b.x) - b.y) ** 2).mean(),
    "a vector of one number each": lambda n, b: ((n(b.x)[:, 0] - b.y[:, 0]) ** 2).mean(),
    "halves, summed": lambda n, b: ((n(b.x) - b.y) ** 2 / 2).sum(),
    "sum inside, mean outside": lambda n, b: ((n(b.x) - b.y) ** 2).sum(dim=1).mean(dim=0),
    "mean of means": lambda n, b: ((n(b.x) - b.y) ** 2).mean(0).mean(),
    "sum of sums": lambda n, b: ((n(b.x) - b.y) ** 2).sum(0).sum(),
    "l1": lambda n, b: F.l1_loss(n(b.x), b.y),
    "smooth l1": lambda n, b: F.smooth_l1_loss(n(b.x), b.y),
    "huber": lambda n, b: F.huber_loss(n(b.x), b.y),
    "bce": lambda n, b: F.binary_cross_entropy(n(b.x).sigmoid(), b.probs),
    "bce with logits": lambda n, b: F.binary_cross_entropy_with_logits(
        n(b.x), b.probs, weight=b.y.abs(), pos_weight=CLASS_WEIGHT
    ),
    "kl batchmean": lambda n, b: F.kl_div(n(b.x).log_softmax(1), b.probs, reduction="batchmean"),
    "distillation": lambda n, b: (
        0.7 * F.kl_div((n(b.x) / 2).log_softmax(1), b.probs, reduction="batchmean") * 4
        + 0.3 * F.cross_entropy(n(b.x), b.labels)
    ),
    "soft margin": lambda n, b: F.soft_margin_loss(n(b.x), b.y.sign()),
    "multi margin": lambda n, b: F.multi_margin_loss(n(b.x), b.kinds, weight=CLASS_WEIGHT),
    "multilabel margin": lambda n, b: F.multilabel_margin_loss(n(b.x), torch.tensor([[1, 2, -1, 0]] * b.rows)),
    "multilabel soft margin": lambda n, b: F.multilabel_soft_margin_loss(n(b.x), b.probs.round()),
    "cosine embedding": lambda n, b: F.cosine_embedding_loss(n(b.x), b.y, b.signs),
    "margin ranking": lambda n, b: F.margin_ranking_loss(n(b.x)[:, 0], n(b.x)[:, 1], b.signs),
    "triplet": lambda n, b: F.triplet_margin_loss(n(b.x), b.y, b.probs),
    "hinge embedding": lambda n, b: F.hinge_embedding_loss(n(b.x), b.y.sign()),
    "gaussian": lambda n, b: F.gaussian_nll_loss(n(b.x), b.y, b.probs),
    "poisson": lambda n, b: F.poisson_nll_loss(n(b.x), b.probs),
    "ctc": lambda n, b: F.ctc_loss(
        n(b.x).log_softmax(1).expand(6, -1, -1),
        b.kinds[:, None] % 3 + 1,
        torch.full((b.rows,), 6),
        torch.ones(b.rows).long(),
    ),
    "vae, sums": lambda n, b: (
        F.mse_loss(n(b.x), b.y, reduction="sum") - 0.5 * torch.sum(1 + n(b.x) - n(b.x).pow(2) - n(b.x).exp())
    ),
    "vae, per sample": lambda n, b: (
        F.mse_loss(n(b.x), b.y, reduction="none").sum(1).mean()
        + torch.mean(-0.5 * torch.sum(1 + n(b.x) - n(b.x).exp(), dim=1), dim=0) * 0.1
    ),
    "masked": lambda n, b: ((n(b.x) - b.y) ** 2 * b.mask).sum() / b.mask.sum(),
    "masked selection": lambda n, b: ((n(b.x) - b.y) ** 2)[b.mask.bool()].mean(),
    "nansum": lambda n, b: ((n(b.x) - b.y) ** 2).nansum(),
    "nanmean": lambda n, b: ((n(b.x) - b.y) ** 2).nanmean(),
    "dot": lambda n, b: n(b.x).flatten() @ b.y.flatten(),
    "weighted samples": lambda n, b: (
        (F.mse_loss(n(b.x), b.y, reduction="none").mean(1) * b.probs[:, 0]).sum() / b.probs[:, 0].sum()
    ),
    "accumulation": lambda n, b: F.cross_entropy(n(b.x), b.labels) / 4,
    "negated": lambda n, b: 2.5 - (-F.mse_loss(n(b.x), b.y)) * 2,
    "stacked": lambda n, b: torch.stack([F.mse_loss(n(b.x), b.y), n(b.x).square().sum()]).mean(),
    "concatenated": lambda n, b: torch.cat([F.mse_loss(n(b.x), b.y).view(1), n(b.x).mean().unsqueeze(0)]).sum(),
    "one of several": lambda n, b: torch.stack([F.mse_loss(n(b.x), b.y), n(b.x).square().sum()])[-1],
    "mean of a number": lambda n, b: F.mse_loss(n(b.x), b.y).mean().float().double().clone(),
    "one element, not a number": lambda n, b: F.mse_loss(n(b.x), b.y).reshape(1, 1) * torch.tensor([[3.0]]),
    "subtracted": lambda n, b: torch.sub(2 - F.mse_loss(n(b.x), b.y), n(b.x).sum(), alpha=0.3),
    "wasserstein": lambda n, b: n(b.y.repeat(1, 2)[:, :5]).mean() - n(b.x).mean(),
    "summed with python": lambda n, b: sum([F.mse_loss(n(b.x), b.y), 0.1 * n(b.x).abs().mean()]) + 0.0,  # type: ignore
    "in place": accumulated,
    "times zero": lambda n, b: F.mse_loss(n(b.x), b.y) + 0.0 * sum(p.sum() for p in n.parameters()),
    "cancelled": lambda n, b: (lambda loss: loss - loss + n(b.x).sum())(F.mse_loss(n(b.x), b.y)),
    "used twice": lambda n, b: (lambda loss: 0.3 * loss + loss / 2)(F.mse_loss(n(b.x), b.y)),
    "weight decay": lambda n, b: F.cross_entropy(n(b.x), b.labels) + 1e-2 * l2(n),
    "norms of weights": lambda n, b: F.mse_loss(n(b.x), b.y) + 0.1 * sum(p.norm() for p in n.parameters()),
    "root of squares of weights": lambda n, b: F.mse_loss(n(b.x), b.y) + l2(n).sqrt(),
    "l1 penalty": lambda n, b: n(b.x).square().sum() + sum(p.abs().mean() for p in n.parameters()),
    "flat penalty": lambda n, b: F.mse_loss(n(b.x), b.y) + torch.cat([p.view(-1) for p in n.parameters()]).pow(2).sum(),
    "ewc": lambda n, b: F.mse_loss(n(b.x), b.y, reduction="sum") + ewc(n) / 2,
    "ewc with fisher": lambda n, b: F.mse_loss(n(b.x), b.y) + fisher(n),
    "orthogonal": lambda n, b: (
        F.mse_loss(n(b.x), b.y) + (n.body[0].weight @ n.body[0].weight.T - torch.eye(7)).square().sum()
    ),
    "a bare parameter": lambda n, b: F.mse_loss(n(b.x), b.y) + n.log_scale,
    "a function of a parameter": lambda n, b: F.mse_loss(n(b.x), b.y) + 2 * n.log_scale.exp(),
    "learned scale": lambda n, b: ((n(b.x) - b.y) ** 2 * (-n.log_scale).exp()).mean() + n.log_scale / 2,
    "dice per sample": dice,
    "gradient penalty": lambda n, b: penalty(n, b),
    "entropy bonus": lambda n, b: (
        F.cross_entropy(n(b.x), b.labels) - 0.01 * torch.distributions.Categorical(logits=n(b.x)).entropy().mean()
    ),
}


def penalty(net: Net, b: Batch) -> Tensor:
    x = b.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return net(x).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(net: Net) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]


def factors(readings: list[LossTerms], index: int) -> list[float]:
    """By the rule: counts add up, so do constants that differ between parts; terms of parameters count once."""
    terms = [reading.terms[index] for reading in readings]
    if terms[0].is_of_parameters:
        return [1 / len(terms)] * len(terms)
    constants = [float(term.constant) for term in terms]
    is_constant = all(math.isclose(constant, constants[0]) for constant in constants)
    if terms[0].count is not None:
        assert is_constant
        parts = [float(term.count) for term in terms]
    else:
        parts = constants
    if terms[0].count is None and is_constant:
        return [1.0] * len(terms)
    return [part / sum(parts) for part in parts]


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_parts_make_that_of_the_whole(name: str) -> None:
    net, loss_of = Net(), LOSSES[name]
    whole = loss_of(net, Batch())
    reading = read(whole)
    assert not reading.obstacle
    assert obstacle_below(reading, ROWS) == ""
    flags = [term.is_of_parameters for term in reading.terms]
    whole.backward()
    expected = gradients(net)

    losses = [loss_of(net, Batch(part)) for part in PARTS]
    readings = [read(loss) for loss in losses]
    assert [reading.obstacle for reading in readings] == [""] * len(PARTS)
    total = [torch.zeros_like(p) for p in net.parameters()]
    weights = [factors(readings, index) for index in range(len(flags))]
    for place, (loss, part) in enumerate(zip(losses, readings, strict=True)):
        assert [term.is_of_parameters for term in part.terms] == flags
        net.zero_grad()
        hooks = [
            term.node.register_prehook(lambda grads, factor=weight[place]: tuple(grad * factor for grad in grads))
            for term, weight in zip(part.terms, weights, strict=True)
        ]
        loss.backward()
        for hook in hooks:
            hook.remove()
        total = [sum_ + grad for sum_, grad in zip(total, gradients(net), strict=True)]
    for one, other in zip(total, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


OBSTACLES: dict[str, tuple[Loss, str]] = {
    "rmse": (lambda n, b: F.mse_loss(n(b.x), b.y).sqrt(), "the root of a mean"),
    "log": (lambda n, b: n(b.x).square().sum().log(), "the logarithm of a sum"),
    "square": (lambda n, b: n(b.x).mean() ** 2 / 2, "the power of a mean"),
    "flooding": (lambda n, b: (n(b.x).mean() - 0.1).abs() + 0.1, "the absolute value of a mean"),
    "free bits": (lambda n, b: n(b.x).mean().clamp(min=0.1), "the limit of a mean"),
    "product": (lambda n, b: n(b.x).mean() * n(b.y.repeat(1, 2)[:, :5]).sum(), "a product of two losses"),
    "quotient": (lambda n, b: n(b.x).sum() / n(b.x).exp().sum(), "a quotient of two losses"),
    "in the denominator": (lambda n, b: 2 / n(b.x).mean(), "the reciprocal of a mean"),
    "norm": (lambda n, b: n(b.x).norm(), "the norm of samples"),
    "logsumexp": (lambda n, b: n(b.x).flatten().logsumexp(0), "the logarithm of a sum of exponentials of samples"),
    "maximum": (lambda n, b: n(b.x).max(), "the maximum of samples"),
    "larger of two": (lambda n, b: torch.maximum(n(b.x).mean(), n(b.x).sum()), "the maximum of a mean"),
    "variance": (lambda n, b: n(b.x).var(), "the variance of samples"),
    "one sample": (lambda n, b: (n(b.x)[0, 0] - 1) ** 2, "a loss with no mean or sum"),
    "own function": (lambda n, b: Twice.apply(n(b.x).mean()), "its parts cannot be added up after twicebackward"),
    "vector": (lambda n, b: n(b.x), "backward of a tensor that is no single number"),
    "learned weight": (lambda n, b: F.mse_loss(n(b.x), b.y) * n.log_scale.exp(), "a product of two losses"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_loss_that_is_no_sum_says_why(name: str) -> None:
    loss_of, text = OBSTACLES[name]
    assert read(loss_of(Net(), Batch())) == LossTerms((), text, ())


def test_a_compiled_loss_says_why() -> None:
    class CompiledFunction(Twice):
        pass

    assert (
        read(CompiledFunction.apply(Net()(Batch().x).mean())).obstacle == "a compiled loss, which cannot be looked into"
    )


def test_a_used_graph_says_why() -> None:
    loss = F.cross_entropy(Net()(Batch().x), Batch().labels)
    loss.backward()
    assert read(loss).obstacle == "a graph that a backward has used up"


# --- Below the terms ---


def contrastive(z: Tensor, other: Tensor) -> Tensor:
    return F.cross_entropy(z @ other.T / 0.1, torch.arange(len(z)))


def simclr(z: Tensor) -> Tensor:
    both = F.normalize(torch.cat([z, z * 1.1]))
    matrix = (both @ both.T).masked_fill(torch.eye(len(both)).bool(), -1e9)
    return F.cross_entropy(matrix, torch.arange(len(both)).roll(len(z)))


def unrolled(z: Tensor) -> Tensor:
    loss: Any = 0
    for row in z:
        loss += row.square().mean()
    return loss / len(z)


MIXED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "clip": (lambda z: contrastive(z, z.exp()), "compared"),
    "detached keys": (lambda z: contrastive(z, z.detach()), "compared"),
    "simclr": (simclr, "compared (a matrix of 64 x 64)"),
    "einsum": (lambda z: torch.einsum("nd,md->nm", z, z).exp().mean(), "compared"),
    "cdist": (lambda z: torch.cdist(z, z).mean(), "compared"),
    "pdist": (lambda z: F.pdist(z).mean(), "compared"),
    "differences": (lambda z: (z[:, None] - z[None]).square().mean(), "compared"),
    "cosines": (lambda z: F.cosine_similarity(z[:, None], z[None], dim=-1).mean(), "compared"),
    "cosines of two views": (
        lambda z: F.cosine_similarity(torch.cat([z, z])[:, None], torch.cat([z, z])[None], dim=-1).mean(),
        "compared",
    ),
    "target lacks a dimension": (lambda z: (z[:, :1] - torch.zeros(len(z))).square().mean(), "compared"),
    "repeated": (lambda z: (z.repeat(len(z), 1) - z.repeat_interleave(len(z), 0)).square().mean(), "compared"),
    "barlow twins": (lambda z: (z.T @ z / len(z)).square().sum(), "sum along the batch"),
    "variance": (lambda z: (1 - z.var(0)).relu().mean(), "var) along the batch"),
    "normalized by hand": (lambda z: ((z - z.mean(0)) / z.std(0)).square().mean(), "along the batch"),
    "mean, used twice": (lambda z: (lambda m: m.mean() + (z - m).square().mean())(z.mean(0)), "a mean along the batch"),
    "mean then sum": (lambda z: z.square().mean(0).sum(), "a mean along the batch"),
    "balance of as many experts as samples": (
        lambda z: (z.repeat_interleave(5, 0)[:, :1].expand(-1, 32).mean(0) * torch.rand(32)).sum(),
        "a mean along the batch",
    ),
    "whole mean": (lambda z: (z - z.mean()).square().mean(), "a mean over the whole batch"),
    "loss in a loss": (lambda z: (lambda m: m + (z - m).square().mean())(z.mean()), "used in another part"),
    "whole maximum": (lambda z: (z / z.max()).square().mean(), "over the whole batch"),
    "weighted losses": (lambda z: (torch.stack([z.mean(), z.exp().mean()]) * torch.ones(2)).sum(), "whole batch"),
    "softmax along the batch": (lambda z: z.softmax(0).square().sum(), "along the batch"),
    "sorted": (lambda z: (z.sort(0)[0] - torch.randn(32, 1)).square().mean(), "along the batch"),
    "cumulated": (lambda z: z.cumsum(0).square().mean(), "along the batch"),
    "rolled": (lambda z: (z - z.roll(1, 0)).square().mean(), "along the batch"),
    "flipped": (lambda z: (z - z.flip(0)).square().mean(), "along the batch"),
    "permuted": (lambda z: (z - z[torch.randperm(len(z))]).square().mean(), "picked by their place"),
    "neighbours": (lambda z: (z[1:] - z[:-1]).square().mean(), "picked by their place"),
    "halves": (lambda z: (z.chunk(2)[0] - z.chunk(2)[1]).square().mean(), "picked by their place"),
    "one by one": (unrolled, "a loss for each sample (32 of them)"),
    "dice of the batch": (lambda z: 1 - (z * 2).sigmoid().sum(0).log().mean(), "along the batch"),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_mixes_samples_says_how(name: str) -> None:
    loss_of, text = MIXED[name]
    reading = read(loss_of(nn.Linear(12, 20)(torch.randn(32, 12))))
    assert reading.obstacle == ""
    assert text in obstacle_below(reading, 32).replace("with each other ", "")


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, is_first: bool = True) -> None:
        super().__init__()
        self.layer, self.is_first = layer, is_first

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)[0]
        return out[:, -1] if self.is_first else out[-1]


class Packed(nn.Module):
    """Sequences of several lengths, the shorter ones left out of the last steps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) % 5 + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Attends(nn.Module):
    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(width, 4, batch_first=True), options

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, **self.options)[0]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu()
        h = h * self.gate(h.mean((2, 3))).sigmoid()[:, :, None, None]
        return (h + self.first(x)).amax((2, 3))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(11, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([F.group_norm(self.up(self.down(x).relu()), 2), x], dim=1))


class Gat(nn.Module):
    """A dense graph attention over the nodes of each sample's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.one, self.other = nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        scores = F.leaky_relu(self.one(h) + self.other(h).transpose(1, 2))
        return (scores.softmax(-1) @ h).mean(1)


class Vae(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean, self.log_variance, self.out = nn.Linear(width, 8), nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mean(x) + torch.randn(len(x), 8) * (self.log_variance(x) / 2).exp())


class Words(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, width), nn.Parameter(torch.zeros(1, length, width))
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places
        h = torch.cat([self.token.expand(len(x), -1, -1), h], dim=1)
        q = h.view(len(x), -1, 4, h.shape[-1] // 4).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-5)
        return h[:, 0] @ self.words.weight.T


def lora(width: int) -> nn.Module:
    frozen = nn.Linear(width, width)
    frozen.requires_grad_(False)
    return nn.Sequential(nn.Linear(width, 4), nn.Linear(4, width), frozen, nn.ReLU(), nn.Linear(width, 10))


ROWS_BELOW = 16
SPECTRAL = nn.utils.parametrizations.spectral_norm
EVERYDAY: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(16, 16)),
    "mlp with norms": lambda: (
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.LayerNorm(32), nn.Dropout(), nn.Linear(32, 1)),
        torch.randn(16, 16),
    ),
    "one feature": lambda: (nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(16, 1)),
    "cnn": lambda: (
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 16)),
        torch.randn(16, 1, 16, 16),
    ),
    "resnet": lambda: (Residual(16), torch.randn(16, 3, 8, 8)),
    "unet": lambda: (UNet(), torch.randn(16, 3, 16, 16)),
    "lstm": lambda: (Recurrent(nn.LSTM(6, 16, batch_first=True)), torch.randn(16, 5, 6)),
    "lstm, time first": lambda: (Recurrent(nn.LSTM(6, 16), False), torch.randn(5, 16, 6)),
    "lstm, as many steps as samples": lambda: (Recurrent(nn.LSTM(6, 16, batch_first=True)), torch.randn(16, 16, 6)),
    "gru": lambda: (Recurrent(nn.GRU(6, 16, 2, batch_first=True, bidirectional=True)), torch.randn(16, 5, 6)),
    "gru, time first": lambda: (Recurrent(nn.GRU(6, 16), False), torch.randn(5, 16, 6)),
    "lstm, packed": lambda: (Packed(nn.LSTM(6, 16, batch_first=True)), torch.randn(16, 5, 6)),
    "gru, packed": lambda: (Packed(nn.GRU(6, 16, batch_first=True)), torch.randn(16, 5, 6)),
    "rnn": lambda: (Recurrent(nn.RNN(6, 16, batch_first=True)), torch.randn(16, 7, 6)),
    "encoder": lambda: (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(16, 5, 16)),
    "encoder, time first": lambda: (nn.TransformerEncoderLayer(16, 4, 32), torch.randn(5, 16, 16)),
    "encoder, as many tokens as samples": lambda: (
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        torch.randn(16, 16, 16),
    ),
    "attention": lambda: (Attends(16), torch.randn(16, 5, 16)),
    "attention without weights": lambda: (Attends(16, need_weights=False), torch.randn(16, 5, 16)),
    "gat": lambda: (Gat(), torch.randn(16, 16, 6)),
    "vae": lambda: (Vae(16), torch.randn(16, 16)),
    "words": lambda: (Words(16, 16), torch.randint(0, 50, (16, 16))),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), torch.randn(16, 16)),
    "spectral norm": lambda: (nn.Sequential(SPECTRAL(nn.Linear(16, 16)), nn.Linear(16, 1)), torch.randn(16, 16)),
    "lora": lambda: (lora(64), torch.randn(16, 64)),
    "bilinear": lambda: (nn.Sequential(nn.Linear(16, 48), nn.GLU(), nn.Unflatten(1, (2, 12))), torch.randn(16, 16)),
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_an_everyday_model_has_no_obstacle(name: str) -> None:
    model, x = EVERYDAY[name]()
    assert obstacle_below(read(model(x).square().mean()), ROWS_BELOW) == ""


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.LSTM(6, 8), torch.randn(16, 5, 6)),
        (nn.GRU(6, 8), torch.randn(16, 5, 6)),
        (nn.LSTM(6, 8), torch.randn(16, 6)),
        (nn.TransformerEncoderLayer(8, 4, 32), torch.randn(16, 5, 8)),
    ],
    ids=["lstm", "gru", "lstm of a table", "encoder"],
)
def test_a_batch_in_the_place_of_time_is_seen(layer: nn.Module, x: Tensor) -> None:
    out = layer.double()(x.double())
    loss = (out[0] if isinstance(out, tuple) else out).square().mean()
    assert obstacle_below(read(loss), ROWS_BELOW)


# --- What a reading holds ---


def test_constants_are_what_divides_on_the_way_to_the_root() -> None:
    net, b = Net(), Batch()
    reading = read((F.mse_loss(net(b.x), b.y) * 0.5 - net(b.x).sum() / b.mask.sum()) / 4)
    assert [(term.count, term.constant) for term in reading.terms] == [(32.0, 8.0), (None, -4.0 * float(b.mask.sum()))]
    assert [term.count for term in read(F.cross_entropy(net(b.x), b.labels)).terms] == [6.0]


def test_the_factor_of_a_gradient_scaler_is_left_out() -> None:
    loss = F.mse_loss(Net()(Batch().x), Batch().y) / 2
    scaled = loss * torch.tensor(65536.0)
    assert read(scaled, lambda node: node is scaled.grad_fn).terms[0].constant == 2.0


def test_nothing_waits_for_numbers_on_a_device() -> None:
    hidden = nn.Linear(5, 4, device="meta")(
        torch.empty(8, 5, device="meta")
    )  # a tensor that has no numbers to wait for
    mask = torch.ones(8, device="meta")
    loss = F.cross_entropy(hidden, torch.zeros(8, dtype=torch.long, device="meta")) * mask.mean()
    reading = read(0.5 * loss + hidden.sum() / mask.sum() / 2 + loss / 4)
    assert reading.obstacle == ""
    assert [type(term.constant) for term in reading.terms] == [Tensor, Tensor]
    assert {type(term.count) for term in reading.terms} == {Tensor, type(None)}


def test_a_parameter_that_is_a_term_and_in_another_is_an_obstacle() -> None:
    net, b = Net(), Batch()
    reading = read(((net(b.x) * net.log_scale - b.y) ** 2).mean() + net.log_scale)
    assert "used in another part" in obstacle_below(reading, ROWS)


def test_scalars_are_the_root_and_the_numbers_below_it() -> None:
    net, b = Net(), Batch()
    one, other = F.mse_loss(net(b.x), b.y), net(b.x).sum()
    loss = one + 0.1 * other
    root = loss / 4
    found = {scalar.node: scalar.terms for scalar in read(root).scalars}
    assert next(iter(found)) is root.grad_fn
    assert [found[value.grad_fn] for value in (root, loss, one, other)] == [(0, 1), (0, 1), (0,), (1,)]


def test_long_sums_are_read_without_recursion() -> None:
    net, b = Net(), Batch()
    out, loss = net(b.x), torch.zeros(())
    for _ in range(2000):
        loss = loss + F.mse_loss(out, b.y)
    reading = read(loss)
    assert len(reading.terms) == 2000
    assert obstacle_below(reading, 7) == ""
    for _ in range(60):
        loss = loss + loss
    assert read(loss).terms[0].constant == 2.0**-60


def test_all_ranks_read_the_same_order() -> None:
    def kinds(part: slice) -> list[str]:
        b = Batch(part)
        return [term.node.name() for term in read(LOSSES["smoothing and weights"](net, b) + l2(net)).terms]

    net = Net()
    assert kinds(PARTS[0]) == kinds(PARTS[1]) == kinds(PARTS[2])
