from __future__ import annotations

import math

from display.runs import a_run
from nbaccel.base.events import Loss, Metric, OutOfMemory, Phase, Progress, RecordsLost
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, RunState, line, text

FACTS = RunFacts("Cell In[5]", "2 x Tesla T4, fp16", ("GPU 0", "GPU 1"))


def test_the_text_carries_every_number() -> None:
    history = a_run()
    loss = history.phase.series["loss"]
    assert text(history, FACTS, 50.0).splitlines() == [
        "Cell In[5]: running",
        "2 x Tesla T4, fp16",
        "epoch 1/3, batch 500/500, step 500, 33 %, 10.0 steps/s, 50 s, 1 min 40 s left, 50 s per epoch",
        f"loss {loss.latest:#.4g} (rank 0 {loss.last[0]:#.4g}, rank 1 {loss.last[1]:#.4g}, "
        f"lowest {loss.lowest:#.4g}, highest {loss.highest:#.4g})",
        "acc 0.8105 (lowest 0, highest 0.8105)",
        "rank 0: GPU 0 9.1 of 14.7 GB, peak 11.2 GB",
        "rank 1: GPU 1 9.1 of 14.7 GB, peak 11.2 GB",
    ]


def test_the_end_is_said_in_words() -> None:
    words = text(a_run(), FACTS, 50.0, RunState("failed", "failed: rank 1, ValueError: 11 classes")).splitlines()
    assert words[0] == "Cell In[5]: failed: rank 1, ValueError: 11 classes"


def test_what_happened_and_what_was_lost_is_said() -> None:
    history = a_run()
    history.feed(1, 50.0, OutOfMemory(499, "forward", 64, 32, 64))
    history.feed(0, 50.0, RecordsLost(1))
    assert text(history, FACTS, 50.0).splitlines()[-2:] == [
        "step 499: rank 1 ran out of memory in forward with 64 samples; goes on with 32",
        "1 record did not arrive: the curves have gaps, the training has none",
    ]


def test_a_loss_that_is_no_number_says_since_when_and_on_which_rank() -> None:
    history = History(2)
    for rank in (0, 1):
        for step in range(4):
            history.feed(rank, 1.0, Loss(math.nan if rank and step >= 2 else 1.0, step))
    assert "not finite since step 2 on rank 1" in text(history, FACTS, 1.0)


def test_a_rank_that_is_behind_says_so() -> None:
    history = History(2)
    history.feed(0, 0.0, Progress(step=0, batch=0))
    history.feed(0, 1.0, Progress(step=40, batch=40))
    history.feed(1, 1.0, Progress(step=5, batch=5))
    assert "rank 1: 35 steps behind" in text(history, FACTS, 1.0)
    assert "rank 1: 35 steps behind" in text(history, FACTS, 1.0, RunState("failed", "failed: rank 1, ValueError"))
    assert "behind" not in text(history, FACTS, 1.0, RunState.ended("done", 1.0, 40)), "what was heard last is old"


def test_a_loop_that_waits_for_data_much_of_its_time_says_so() -> None:
    history = History(1)
    history.feed(0, 1.0, Progress(step=1, batch=1, waiting=0.24))
    assert "waiting" not in text(history, FACTS, 1.0)
    history.feed(0, 2.0, Progress(step=2, batch=2, waiting=0.45))
    assert "2 s, 45 % of it waiting for data" in text(history, FACTS, 2.0)


def test_an_evaluation_and_a_phase_are_named() -> None:
    history = History(1)
    history.feed(0, 0.1, Phase("fold 2"))
    history.feed(0, 1.0, Progress(batch=3, batches=12, is_training=False))
    assert "fold 2, evaluating, batch 3/12, 25 %" in text(history, FACTS, 1.0)


def test_the_line_is_one_line() -> None:
    assert line(a_run(on_device=False), RunFacts(), 50.0) == (
        f"epoch 1/3, batch 500/500, step 500, 33 %, loss {a_run().phase.series['loss'].latest:#.4g}, acc 0.8105, "
        "10.0 steps/s, 50 s, 1 min 40 s left, memory 0.40 GB"
    )


def test_of_many_numbers_a_line_has_losses_and_measures_and_says_how_many_more_there_are() -> None:
    history = History(1)
    logged = {
        "loss": 0.5, "grad_norm": 2.0, "learning_rate": 1e-4, "epoch": 1.0, "eval_loss": 0.25, "eval_accuracy": 0.75,
        "eval_runtime": 0.4, "eval_samples_per_second": 322.5, "train_loss": 0.4, "total_flos": 3.6e9,
    }  # fmt: skip
    history.feed(0, 1.0, Metric(logged, step=3))
    done = RunState.ended("done", 2.0, 4)
    told = "loss 0.5000, eval_loss 0.2500, train_loss 0.4000, 7 more numbers"
    assert line(history, FACTS, 2.0, done) == f"done in 2 s, 4 steps, {told}"
    chosen = line(history, RunFacts(plots=("grad_norm",)), 2.0, done)
    assert chosen.startswith("done in 2 s, 4 steps, grad_norm 2, loss 0.5000, ")
    assert "total_flos 3.600e+09" in text(history, FACTS, 2.0, done), "the text of the picture has all of them"


def test_the_last_line_says_how_it_ended_and_how_much_it_took() -> None:
    loss = a_run().phase.series["loss"].latest
    assert line(a_run(), FACTS, 50.0, RunState.ended("done", 50.0, 500)) == (
        f"done in 50 s, 500 steps, loss {loss:#.4g}, acc 0.8105, 10.0 steps/s, peak memory 11.2 GB of 14.7 GB"
    )
    assert line(a_run(), FACTS, 50.0, RunState.ended("stopped", 50.0, 500)).startswith(
        "stopped after 50 s, 500 steps, epoch 1/3, batch 500/500, step 500, 33 %, loss"
    )


def test_a_run_that_said_nothing_has_its_time() -> None:
    assert line(History(2), FACTS, 12.0) == "12 s"
    assert text(History(2), RunFacts("run"), 12.0) == "run: running\n12 s"


def test_the_steps_of_a_run_that_is_over_are_said_once() -> None:
    history = History(1)
    for step in range(20):
        history.feed(0, 1.0, Loss(0.5, step))
    state = RunState.ended("failed", 2.0, history.steps, "rank 0, ValueError")
    assert line(history, FACTS, 2.0, state) == "failed after 2 s, 20 steps: rank 0, ValueError, loss 0.5000"


def a_loop(world_size: int = 2, samples: int | None = 32, epochs: int = 2) -> History:
    """Steps of 0.1 s, 50 batches an epoch, whose learning rate falls."""
    history = History(world_size)
    for step in range(50 * epochs):
        for rank in range(world_size):
            rates = (0.1 / (step + 1), 1e-3)
            progress = Progress(step + 1, step % 50 + 1, 50, step // 50, epochs, samples, learning_rates=rates)
            history.feed(rank, step / 10, progress)
    return history


def test_a_training_has_samples_per_second_time_per_epoch_and_learning_rates() -> None:
    words = "10.0 steps/s, 10 s, 0 s left, 640 samples/s, 5 s per epoch, lr 0.001 and 0.001"
    assert text(a_loop(), FACTS, 10.0).splitlines()[2] == f"epoch 2/2, batch 50/50, step 100, 100 %, {words}"
    assert "320 samples/s" in text(a_loop(1), FACTS, 10.0)
    assert "samples/s" not in text(a_loop(samples=None), FACTS, 10.0)
    done = text(a_loop(), FACTS, 10.0, RunState("done", "done in 10 s, 100 steps")).splitlines()
    assert done[2] == "10.0 steps/s, 640 samples/s, 5 s per epoch"


def test_a_training_without_a_loader_has_steps_and_rates_and_neither_epoch_nor_batch() -> None:
    history = History(1)
    for step in range(50):
        history.feed(0, step / 10, Progress(step + 1, learning_rates=(0.1,)))
    assert text(history, FACTS, 5.0).splitlines()[2] == "step 50, 10.0 steps/s, 5 s, lr 0.1"


def test_a_stream_whose_epochs_have_no_length_has_neither() -> None:
    history = History(1)
    for step in range(50):
        history.feed(0, step / 10, Progress(step + 1, step + 1, None, 0, None, 32))
    words = text(history, FACTS, 5.0)
    assert "10.0 steps/s" in words
    assert "samples/s" not in words
    assert "per epoch" not in words
