"""What autograd's graph is known by."""

from __future__ import annotations

import importlib.util

import torch


def test_a_leaf_is_known_also_where_the_notebook_has_gradients_off() -> None:
    spec = importlib.util.find_spec("nbaccel.train.raw_loop.graph")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with torch.no_grad():
        spec.loader.exec_module(module)
    leaf = torch.ones(2, requires_grad=True)
    assert module.leaves_of([(leaf * 2).sum()])[0][0] is leaf
