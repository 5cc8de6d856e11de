"""What every strategy promises: the same tests over all of them, each with as many ranks as it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbaccel.base.world import World
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.partial_state import PartialState
from nbaccel.train.step.precision import Precision
from nbaccel.train.strategies import Strategy, choose_strategy

RANKS = {"single": 1, "ddp": 2, "fsdp": 2}
"""Those that need no other package; tests/features/deepspeed has the last."""


@pytest.fixture(params=RANKS)
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs a function of (strategy, rank) in every rank of one strategy; the values by rank."""
    return _runner(request.param)


def _runner(name: str) -> Callable[..., list[Any]]:
    def run(function: Callable[[Strategy, int], Any]) -> list[Any]:
        def rank() -> Any:
            torch.manual_seed(0)
            state = PartialState()
            _ = state.collectives  # forms the process group, as preparing does
            return function(choose_strategy(state.world, state.device, name), state.process_index)

        return run_ranks(RANKS[name], rank)

    return run


@pytest.fixture(params=("single", "ddp"))
def run_whole(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs as `run` does, in strategies whose ranks hold whole gradients, so that a test can look at a rank's own."""
    return _runner(request.param)


def _set_up(strategy: Strategy, model: torch.nn.Module) -> torch.nn.Module:
    return strategy.setup([model], [], [True])[0]


def _weight(model: torch.nn.Module) -> float:
    """The single weight of `model`, wherever its row is; collective."""
    weight = next(model.parameters()).detach()
    return getattr(weight, "full_tensor", lambda: weight)().item()


def _gradient(model: torch.nn.Module) -> float:
    return next(model.parameters()).grad.item()


def _linear(weight: float = 1.0) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return model


def test_every_rank_starts_from_rank_0s_weights(run: Callable[..., list[Any]]) -> None:
    assert set(run(lambda strategy, rank: _weight(_set_up(strategy, _linear(1.0 + rank))))) == {1.0}


def test_what_was_set_up_can_be_unwrapped_compiled_or_not(run: Callable[..., list[Any]]) -> None:
    def unwrapped(strategy: Strategy, rank: int) -> bool:
        plain = _linear()
        model = _set_up(strategy, plain)
        return (
            strategy.unwrap(model) is plain
            and strategy.unwrap(plain) is plain
            and strategy.unwrap(torch.compile(model, backend="eager")) is plain
            and _set_up(strategy, model) is model
            and strategy.keeps_together(model)
        )

    assert all(run(unwrapped))


def test_gradients_are_those_of_all_ranks_unless_held_back(run_whole: Callable[..., list[Any]]) -> None:
    def gradients(strategy: Strategy, rank: int) -> tuple[float, float]:
        model = _set_up(strategy, _linear())
        x = torch.full((1, 1), 1.0 + rank)
        with strategy.no_sync(model):
            strategy.backward(model(x).sum())
        own = _gradient(model)
        strategy.backward(model(x).sum())
        return own, _gradient(model)

    values = run_whole(gradients)
    mean = sum(own for own, _ in values) / len(values)
    assert [own for own, _ in values] == [1.0 + rank for rank in range(len(values))]
    assert {both for _, both in values} == {2 * mean}


def test_gradients_are_held_back_until_the_outermost_no_sync_ends(run_whole: Callable[..., list[Any]]) -> None:
    def gradient(strategy: Strategy, rank: int) -> float:
        model = _set_up(strategy, _linear())
        x = torch.full((1, 1), 1.0 + rank)
        with strategy.no_sync(model):
            with strategy.no_sync(model):
                strategy.backward(model(x).sum())
            strategy.backward(model(x).sum())
            return _gradient(model)

    for rank, value in enumerate(run_whole(gradient)):
        assert value == 2.0 * (1 + rank)


def test_gradients_that_were_held_back_can_be_synchronised_later(run_whole: Callable[..., list[Any]]) -> None:
    def gradient(strategy: Strategy, rank: int) -> float:
        model = _set_up(strategy, _linear())
        with strategy.no_sync(model):
            loss = model(torch.full((1, 1), 1.0 + rank)).sum()
        with strategy.sync_in_backward(model):
            strategy.backward(loss)
        return _gradient(model)

    values = run_whole(gradient)
    assert set(values) == {1.0 + (len(values) - 1) / 2}


def test_a_step_is_taken_and_answers_for_itself(run: Callable[..., list[Any]]) -> None:
    def step(strategy: Strategy, rank: int) -> tuple[bool, float, float]:
        model = _set_up(strategy, _linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy.backward(model(torch.full((1, 1), 4.0)).sum())
        norm = strategy.clip_grad_norm_(list(model.parameters()), 0.5, 2.0).item()
        _, taken = strategy.step(optimizer, Precision(strategy.device), None)
        return taken is True, norm, round(_weight(model), 4)

    assert set(run(step)) == {(True, 4.0, 0.5)}


def test_a_gradient_that_is_not_finite_is_noticed_by_all_ranks(run: Callable[..., list[Any]]) -> None:
    def notices(strategy: Strategy, rank: int) -> list[bool]:
        model = _set_up(strategy, _linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = [strategy.has_finite_gradients(optimizer)]
        for factor in (1e30, float("inf"), float("nan")):
            optimizer.zero_grad()
            strategy.backward(model(torch.ones(1, 1)).sum() * (factor if rank == 0 else 1.0))
            seen.append(strategy.has_finite_gradients(optimizer))
        return seen

    assert all(seen == [True, True, False, False] for seen in run(notices))


def test_state_has_the_users_names_and_loads_again(run_whole: Callable[..., list[Any]]) -> None:
    def names(strategy: Strategy, rank: int) -> list[str]:
        model = _set_up(strategy, _linear(3.0))
        state = {name: value.clone() for name, value in strategy.state_dict(model).items()}
        if rank == 0:
            assert _linear().load_state_dict(state)
        strategy.load_state_dict(model, {"weight": torch.full((1, 1), 4.0)})
        assert _weight(model) == 4.0
        return list(state)

    assert run_whole(names)[0] == ["weight"]


def test_a_model_without_trainable_parameters_stays_as_it_is(run: Callable[..., list[Any]]) -> None:
    def frozen(strategy: Strategy, rank: int) -> bool:
        model = _linear().requires_grad_(False)
        return _set_up(strategy, model) is model and strategy.keeps_together(model)

    assert all(run(frozen))


def test_the_plainest_strategy_that_keeps_the_ranks_together_is_chosen() -> None:
    device = torch.device("cpu")
    assert type(choose_strategy(World(), device)) is Strategy
    assert choose_strategy(World(0, 2, 0, 2), device).has_peers


def test_an_unknown_strategy_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ValueError, match="strategy must be one of 'auto', 'single', 'ddp', 'fsdp', 'deepspeed', got 'sharding'"
    ):
        choose_strategy(World(), torch.device("cpu"), "sharding")
