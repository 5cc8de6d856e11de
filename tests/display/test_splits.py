"""Names of numbers of training and of held-out data."""

from __future__ import annotations

import pytest

from nbaccel.display.splits import is_held_out, metric_and_part
from nbaccel.display.summary import RunFacts


@pytest.mark.parametrize(
    ("training", "held_out"),
    [
        ("loss", "val_loss"),
        ("loss", "eval_loss"),
        ("loss", "loss/val"),
        ("train/loss", "val/loss"),
        ("train_loss", "valid_loss"),
        ("Loss/train", "Loss/test"),
        ("training loss", "validation loss"),
        ("train_loss_step", "val_loss"),
        ("train_loss_epoch", "val_loss_epoch"),
        ("acc", "val_acc"),
        ("train-top-5", "dev-top-5"),
        ("train.mlm.loss", "eval.mlm.loss"),
    ],
)
def test_a_name_says_the_metric_and_of_which_data_it_is(training: str, held_out: str) -> None:
    assert metric_and_part(training)[0] == metric_and_part(held_out)[0]
    assert (is_held_out(training), is_held_out(held_out)) == (False, True)


def test_the_loss_of_training_is_drawn_where_one_of_held_out_data_was_logged_first() -> None:
    assert RunFacts().shown(["val_loss", "train_loss"]) == ["train_loss"]
    assert RunFacts().shown(["val_loss", "acc"]) == ["val_loss", "acc"]
