"""Inference over texts: dealt to the ranks, run in batches, answers gathered in their order. One and two ranks.

First with texts of one length, where what a toolkit adds is the dealing and the gathering. Then with lengths as uneven
as those of real texts: all pad batches in the order in which texts come, and once more we do with `batches_by_length`.
Every answer depends on every token of its text alone, so all must be raw's. Fabric deals no lists: it has no cell.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Make, Row, installed
from benchmarks.loops import NBACCEL, world_size
from benchmarks.party import Bout

__all__ = ["rows"]

_TEXTS, _BATCH = 128, 8
_VOCABULARY, _WIDTH = 100, 128

_HELPED = f"{NBACCEL}, by length"

Text = list[int]


def _even() -> list[Text]:
    draw = random.Random(0)
    return [[draw.randrange(1, _VOCABULARY) for _ in range(32)] for _ in range(_TEXTS)]


def _uneven() -> list[Text]:
    """Lengths around 32, some of them 300 and more."""
    draw = random.Random(0)
    lengths = [1 + int(draw.lognormvariate(3.1, 0.9)) for _ in range(_TEXTS)]
    return [[draw.randrange(1, _VOCABULARY) for _ in range(length)] for length in lengths]


class _Model(torch.nn.Module):
    """A number for each text: the mean over its tokens, padding left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(_VOCABULARY, _WIDTH, padding_idx=0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(_WIDTH, 4 * _WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * _WIDTH, 1)
        )

    @torch.inference_mode()
    def answers(self, texts: Sequence[Text]) -> list[float]:
        tokens_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        is_token_BT = tokens_BT != 0
        values_BT = self.layers(self.embedding(tokens_BT))[..., 0] * is_token_BT
        answers: list[float] = (values_BT.sum(1) / is_token_BT.sum(1)).tolist()
        return answers


@dataclass(frozen=True)
class _Toolkit:
    """split: this rank's share of a list.  gather: the lists of all ranks as one."""

    split: Callable[[list[Any]], Any]
    gather: Callable[[list[Any]], list[Any]]


def _raw() -> _Toolkit:
    if world_size() > 1:
        dist.init_process_group("gloo")
    ranks, rank = world_size(), dist.get_rank() if world_size() > 1 else 0

    def gather(mine: list[Any]) -> list[Any]:
        if ranks == 1:
            return mine
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, mine)
        return [one for part in everyone for one in part]

    return _Toolkit(lambda whole: whole[len(whole) * rank // ranks : len(whole) * (rank + 1) // ranks], gather)


def _accelerate() -> _Toolkit:
    from accelerate import PartialState
    from accelerate.utils import gather_object

    return _Toolkit(_splitting(PartialState(cpu=True)), gather_object)


def _nbaccel() -> _Toolkit:
    from nbaccel import PartialState
    from nbaccel.utils import gather_object

    return _Toolkit(_splitting(PartialState(cpu=True)), gather_object)


def _splitting(state: Any) -> Callable[[list[Any]], Any]:
    def split(whole: list[Any]) -> Any:
        with state.split_between_processes(whole) as mine:
            return mine

    return split


def _as_they_come(toolkit: _Toolkit, model: _Model, texts: list[Text]) -> list[float]:
    mine = toolkit.split(texts)
    answers = [answer for at in range(0, len(mine), _BATCH) for answer in model.answers(mine[at : at + _BATCH])]
    return toolkit.gather(answers)


def _by_length(toolkit: _Toolkit, model: _Model, texts: list[Text]) -> list[float]:
    from nbaccel import batches_by_length

    batches = batches_by_length(map(len, texts), _BATCH)
    answers = [model.answers([texts[index] for index in batch]) for batch in toolkit.split(batches)]
    return batches.restore(toolkit.gather(answers))


Way = Callable[[_Toolkit, _Model, list[Text]], list[float]]


def _bout(make: Callable[[], _Toolkit], way: Way, texts: list[Text]) -> Bout:
    toolkit, model, answers = make(), _Model(), list[float]()

    def turn() -> None:
        answers[:] = way(toolkit, model, texts)

    return Bout(turn, lambda: torch.tensor(answers))


def _row(name: str, texts: list[Text], ranks: int, targets: Mapping[str, float]) -> Row:
    """targets: of our ways, which are the row's."""
    makes: dict[str, Make] = {
        "raw": lambda: _bout(_raw, _as_they_come, texts),
        "Accelerate": lambda: _bout(_accelerate, _as_they_come, texts),
        NBACCEL: lambda: _bout(_nbaccel, _as_they_come, texts),
        _HELPED: lambda: _bout(_nbaccel, _by_length, texts),
    }
    if _HELPED not in targets:
        del makes[_HELPED]
    return Row(
        f"{name}, {ranks} rank{'s' if ranks > 1 else ''}",
        installed(makes, {"Accelerate": "accelerate"}),
        units=_TEXTS,
        world_size=ranks,
        turns=20,
        judged="wall" if ranks > 1 else "cpu",
        targets=targets,
    )


def rows() -> Sequence[Row]:
    return [
        row
        for ranks, most in ((1, 1.05), (2, 1.15))
        for row in (
            _row("inference, texts of one length", _even(), ranks, {NBACCEL: most}),
            _row("inference, texts of uneven lengths", _uneven(), ranks, {NBACCEL: most, _HELPED: 0.8}),
        )
    ]
