"""Names that hold losses of a rank's own part, told by the text of a cell."""

from __future__ import annotations

import ast
import textwrap

import pytest

from nbaccel.features.check.trained_names import trained_names


def step(x, y):  # type: ignore[no-untyped-def]
    loss = (x - y).sum()
    loss.backward()
    return loss


def evaluate(model):  # type: ignore[no-untyped-def]
    return model.score()


CELLS = {
    "a list of a loop": (
        """
        losses = []
        for epoch in range(3):
            for x, y in loader:
                loss = model(x, y)
                accelerator.backward(loss)
                losses.append(loss.item())
        mean = sum(losses) / len(losses)
        """,
        {"loss", "losses", "mean"},
        {"epoch", "x", "y"},
    ),
    "a score beside it, by epoch": (
        """
        for epoch in range(3):
            total = 0
            for x, y in loader:
                loss = model(x, y)
                loss.backward()
                total += loss.item()
            curve.append(total / 9)
            right = 0
            for x, y in test_loader:
                right += model(x, y)
            accuracy = right / 100
            history.append((total, accuracy))
        """,
        {"loss", "total", "curve", "history"},
        {"right", "accuracy"},
    ),
    "functions of other cells": (
        """
        for x, y in loader:
            last = step(x, y)
        seen = step(1, 2)
        score = evaluate(model)
        """,
        {"last", "seen"},
        {"score"},
    ),
    "a function of this cell": (
        """
        def fit(epochs):
            for epoch in range(epochs):
                step(1, 2)
            return [1]
        def test(model):
            return 0.5
        curve = fit(3)
        score = test(model)
        """,
        {"curve"},
        {"score", "epoch"},
    ),
}


@pytest.mark.parametrize("cell", CELLS)
def test_losses_are_told_from_scores(cell: str) -> None:
    text, trained, others = CELLS[cell]
    found = trained_names(ast.parse(textwrap.dedent(text)), {"step": step, "evaluate": evaluate, "model": object()})
    assert trained <= found
    assert not others & found
