"""Gradients at a cell's first step are recorded: in plain arithmetic, of several batches in turn, with their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from nbaccel.features.check.dry_run.gradient_probe import GradientProbe, plain_arithmetic
from nbaccel.features.clean_start.torch_flags import TorchFlags

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


class Program:
    """A training loop over `X`.  ended: it came to its end."""

    def __init__(self, model: nn.Module | None = None, lr: float = 0.5) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 1) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)
        self.ended = False

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()  # type: ignore[no-any-return]

    def __call__(self) -> None:
        for (x,) in DataLoader(TensorDataset(X), 8):
            self.optimizer.zero_grad()
            self.loss(x).backward()
            self.change()
            self.optimizer.step()
        self.ended = True

    def change(self) -> None:
        """Change what the optimizer is about to use."""


def probed(program: Callable[[], None], folder: Path, turns: int = 1, steps: int | None = 1) -> dict[str, Any]:
    records: list[Any] = []
    path = folder / "values"
    with GradientProbe(records.append, path, turns, steps):
        program()
    (record,) = records
    assert record["kind"] == "gradients"
    return {**record, "values": torch.frombuffer(bytearray(path.read_bytes() or bytes(4)), dtype=torch.float32)}


def gradient_of(x: Tensor) -> Tensor:
    program = Program()
    program.loss(x).backward()
    return torch.cat([each.grad.flatten() for each in program.model.parameters() if each.grad is not None])


def test_the_gradients_of_the_first_step_are_recorded_and_the_cell_ends_there(tmp_path: Path) -> None:
    program = Program()
    found = probed(program, tmp_path)
    assert not program.ended
    assert torch.allclose(found["values"], gradient_of(X[:8]))
    assert (found["names"], found["sizes"]) == (["weight", "bias"], [4, 1])
    assert len(found["samples"]) == 8
    assert found["kinds"] == []


def test_one_process_takes_the_batches_of_several_ranks_before_it_steps(tmp_path: Path) -> None:
    program = Program()
    before = [each.detach().clone() for each in program.model.parameters()]
    found = probed(program, tmp_path, turns=3)
    wanted = sum(gradient_of(X[at : at + 8]) for at in (0, 8, 16)) / 3
    assert torch.allclose(found["values"], torch.as_tensor(wanted))
    assert all(map(torch.equal, before, program.model.parameters())), "no step was taken"


def test_a_loop_that_prepares_nothing_is_looked_at_in_its_second_step(tmp_path: Path) -> None:
    assert probed(Program(), tmp_path, steps=None)["step"] == 2


def test_rows_are_those_that_the_model_gets_while_it_trains(tmp_path: Path) -> None:
    class Evaluating(Program):
        def change(self) -> None:
            with torch.no_grad():
                self.model(X)

    assert probed(Evaluating(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))), tmp_path, turns=3)["rows"] == 24


def test_the_parameters_before_the_first_step_have_a_checksum(tmp_path: Path) -> None:
    first = probed(Program(), tmp_path)["parameters"]
    assert probed(Program(), tmp_path, steps=2)["parameters"] == first
    assert probed(Program(nn.Linear(4, 1)), tmp_path)["parameters"] != first


def test_clipping_leaves_gradients_alone(tmp_path: Path) -> None:
    class Clips(Program):
        def change(self) -> None:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1e-6)
            nn.utils.clip_grad_value_(self.model.parameters(), 1e-6)

    program = Clips()
    found = probed(program, tmp_path)
    assert torch.allclose(found["values"], gradient_of(X[:8]))
    assert float(program.norm) == pytest.approx(float(found["values"].norm()))


def test_what_makes_gradients_incomparable_is_recorded(tmp_path: Path) -> None:
    class Draws(Program):
        def loss(self, x: Tensor) -> Tensor:
            return super().loss(x + torch.randn_like(x))

    normed = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    assert probed(Draws(), tmp_path)["kinds"] == ["draws"]
    assert probed(Program(normed), tmp_path)["kinds"] == ["batch norm"]
    assert probed(Program(normed.eval()), tmp_path)["kinds"] == []
    halves = Program(nn.Linear(4, 1).bfloat16())
    halves.loss = lambda x: halves.model(x.bfloat16()).mean()  # type: ignore[method-assign]
    assert probed(halves, tmp_path)["why_not"] == "the parameters are not in fp32"


def test_a_closure_that_is_none_is_none(tmp_path: Path) -> None:
    class Closes(Program):
        def change(self) -> None:
            self.optimizer.step(self.closure)

        closure: Any = None

    program = Closes()
    assert probed(program, tmp_path)["why_not"] == ""
    program.closure = lambda: program.loss(X)
    assert "by a closure" in probed(program, tmp_path)["why_not"]


def test_a_cell_without_a_step_comes_to_its_end(tmp_path: Path) -> None:
    records: list[Any] = []
    with GradientProbe(records.append, tmp_path / "values", 1, None):
        gradient_of(X[:8])
    assert not records


def test_an_error_of_the_cell_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), GradientProbe(print, tmp_path / "values", 1, None):
        1 / 0  # noqa: B018


def test_arithmetic_is_plain_within_and_as_before_afterwards() -> None:
    x = torch.ones(2, 3, 4)
    attention = nn.MultiheadAttention(4, 2, dropout=0.9, batch_first=True)
    with plain_arithmetic():
        assert torch.equal(nn.Dropout(0.9)(x), x)
        assert torch.equal(functional.dropout(x, 0.9), x)
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x, None, 0.9), x)
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x, dropout_p=0.9), x)
        assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert (x @ x.mT).dtype == torch.float32
    assert not torch.equal(functional.dropout(x, 0.9), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x.mT).dtype == torch.bfloat16
    assert functional.dropout.__module__ == "torch.nn.functional"


@pytest.fixture
def tf32() -> Iterator[Any]:
    """torch's switch for products on a GPU, put back afterwards."""
    before = TorchFlags.capture()
    matmul: Any = torch.backends.cuda.matmul
    yield matmul
    before.apply()


def test_products_on_gpus_are_in_fp32_whichever_interface_has_chosen(tf32: Any) -> None:
    if not hasattr(tf32, "fp32_precision"):
        pytest.skip("torch has one interface")
    tf32.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        _ = tf32.allow_tf32  # the older one cannot be read then
    with plain_arithmetic():
        assert tf32.fp32_precision == "ieee"
        assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.deterministic


def test_products_are_in_fp32_though_the_program_chooses_tf32_itself(tf32: Any, tmp_path: Path) -> None:
    seen = []

    class Choosing(Program):
        def loss(self, x: Tensor) -> Tensor:
            torch.set_float32_matmul_precision("high")
            try:
                return super().loss(x)
            finally:
                seen.append(torch.get_float32_matmul_precision())

    probed(Choosing(), tmp_path)
    assert seen == ["highest"]


def test_functions_that_the_program_has_imported_by_name_are_plain_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    monkeypatch.setattr(__main__, "clip", clip_grad_norm_, raising=False)
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    with plain_arithmetic():
        assert float(__main__.clip([weight], 0.1)) == pytest.approx(2.0)  # type: ignore[attr-defined]
    assert torch.equal(weight.grad, torch.ones(4))
    assert __main__.clip is clip_grad_norm_  # type: ignore[attr-defined]


def test_compiled_models_are_run_as_they_are(tmp_path: Path) -> None:
    program = Program()
    model = program.model

    def compiling() -> None:
        program.model = torch.compile(model, backend="no such one")  # type: ignore[assignment]
        assert torch.compile(fullgraph=True)(abs) is abs
        program()

    assert torch.allclose(probed(compiling, tmp_path)["values"], gradient_of(X[:8]))


def test_one_process_has_a_group_for_cells_that_call_collectives_themselves(tmp_path: Path) -> None:
    class Sums(Program):
        def change(self) -> None:
            for each in self.model.parameters():
                torch.distributed.all_reduce(each.grad)

    assert torch.allclose(probed(Sums(), tmp_path, turns=2)["values"], (gradient_of(X[:8]) + gradient_of(X[8:16])) / 2)
    assert not torch.distributed.is_initialized()


def test_of_many_values_some_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.features.check.dry_run.gradient_probe._MOST_VALUES", 3)
    found = probed(Program(), tmp_path)
    assert found["sizes"] == [2, 1]
    assert math.isfinite(float(found["values"].sum()))


def test_a_program_that_has_used_the_newer_switch_of_tf32_is_compared_all_the_same(tf32: Any) -> None:
    if not hasattr(tf32, "fp32_precision"):
        pytest.skip("this torch has one switch")
    tf32.fp32_precision = "tf32"
    with plain_arithmetic():
        assert tf32.fp32_precision == "ieee"
    assert tf32.fp32_precision == "tf32"


@pytest.mark.parametrize("precision", [None, "tf32"])
def test_the_switches_of_a_program_stand_afterwards_as_it_left_them(precision: str | None, tf32: Any) -> None:
    if precision is not None and not hasattr(tf32, "fp32_precision"):
        pytest.skip("this torch has one switch")
    if precision is not None:
        tf32.fp32_precision = precision
    before = TorchFlags.capture()
    with plain_arithmetic():
        pass
    assert TorchFlags.capture() == before
