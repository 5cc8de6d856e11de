from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, strategies as st

from nbaccel.base.events import Event, Progress, Restarted
from nbaccel.display.course import Bar, Course, Left, StepCount
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, line, where

BATCHES = 8


@dataclass
class Rank:
    """A rank of a made-up run with a clock of its own."""

    history: History
    epochs: int | None = 2
    at: float = 10.0
    step: int = 0

    def say(self, event: Event) -> None:
        self.history.feed(0, self.at, event)

    def loop(self, trains: bool, epoch: int, batches: int = BATCHES, batch_s: float = 1.0) -> Iterator[Progress]:
        """Each batch of a loop when half of it is done, and at last its end."""
        word = Progress(self.step, 0, batches, epoch, self.epochs, is_training=trains, first=self.step, began=self.at)
        for batch in range(1, batches + 1):
            self.at += batch_s / 2
            word = replace(word, step=self.step, batch=batch)
            self.say(word)
            yield word
            self.at += batch_s / 2
            self.step += trains
        self.say(replace(word, step=self.step, is_over=True))

    def train(self, epoch: int, batch_s: float = 1.0) -> None:
        for _ in self.loop(True, epoch, batch_s=batch_s):
            pass

    def evaluate(self, batches: int = 4, batch_s: float = 1.0) -> None:
        for _ in self.loop(False, 0, batches, batch_s):
            pass


def new_rank(epochs: int | None = 2) -> Rank:
    return Rank(History(1), epochs)


def left_of(rank: Rank) -> Left:
    left = rank.history.phase.left
    assert left is not None
    return left


# --- time left --------------------------------------------------------------------------------------------------------


def test_the_time_left_counts_the_evaluation_that_goes_on_and_those_to_come() -> None:
    """Two epochs of 8 s, each with an evaluation of 20 s."""
    rank = new_rank()
    rank.train(0)
    assert left_of(rank) == Left(pytest.approx(8.0, rel=0.1))  # no evaluation was seen yet
    for word in rank.loop(False, 0, 20):
        if word.batch == 10:
            assert left_of(rank).seconds == pytest.approx(10 + 8 + 20, rel=0.1)
    assert left_of(rank).seconds == pytest.approx(8 + 20, rel=0.1)
    rank.train(1)
    assert left_of(rank).seconds == pytest.approx(20, rel=0.1)
    for word in rank.loop(False, 0, 20):
        assert left_of(rank).seconds == pytest.approx(20 - word.batch, abs=0.6)
    assert left_of(rank).seconds == pytest.approx(0.0)


def test_an_evaluation_of_unknown_length_makes_the_time_left_a_lower_bound() -> None:
    rank = new_rank()
    rank.train(0)
    rank.say(Progress(rank.step, 3, None, is_training=False, first=rank.step, began=rank.at))
    assert left_of(rank) == Left(pytest.approx(8.0, rel=0.1), is_least=True)
    assert "at least 8.6 s left" in line(rank.history, RunFacts(), 20.0)


def test_the_pace_is_that_of_training_whatever_evaluations_take() -> None:
    rank = new_rank(3)
    for epoch in range(3):
        rank.train(epoch, batch_s=0.5)
        assert rank.history.steps_per_s == pytest.approx(2.0, rel=0.1)
        rank.evaluate(30)
        assert rank.history.steps_per_s == pytest.approx(2.0, rel=0.1)


def test_evaluations_inside_of_an_epoch_come_as_often_as_before() -> None:
    rank = new_rank(2)
    for word in rank.loop(True, 0):
        if word.batch in (4, 8):
            rank.evaluate(10)
    assert left_of(rank).seconds == pytest.approx(8 + 20, rel=0.1)


def test_what_is_left_of_an_epoch_has_its_evaluation_in_it() -> None:
    """The number of epochs is unknown."""
    rank = new_rank(None)
    rank.train(0)
    rank.evaluate(20)
    for word in rank.loop(True, 1):
        if word.batch == 4:
            assert left_of(rank) == Left(pytest.approx(4 + 20, rel=0.1), of_epoch=True)


def test_a_training_that_is_resumed_in_an_epoch_expects_one_evaluation_for_each() -> None:
    rank = new_rank(3)
    start = Progress(70, 7, BATCHES, 0, 3, first=70, began=rank.at)
    for batch in (7, 8):
        rank.at += 1.0
        rank.say(replace(start, step=64 + batch, batch=batch))
    rank.say(replace(start, step=72, batch=8, is_over=True))
    rank.step = 72
    rank.evaluate(10)
    assert left_of(rank).seconds == pytest.approx(2 * (8 + 10), rel=0.1)


def test_an_evaluation_by_itself_has_a_time_of_its_own() -> None:
    rank = new_rank(None)
    for word in rank.loop(False, 0, 10):
        if word.batch == 5:
            assert left_of(rank).seconds == pytest.approx(5.5, abs=0.7)
            assert where(rank.history) == ["evaluating, batch 5/10", "50 % of this evaluation"]


# --- which loop is the training's -------------------------------------------------------------------------------------


def test_a_loop_inside_of_the_training_s_does_not_move_its_place() -> None:
    rank = new_rank(None)
    for word in rank.loop(True, 0):
        if word.batch >= 2:
            for inner in rank.loop(True, 5, 3, batch_s=0.1):
                assert rank.history.phase.training == replace(word, step=word.step, batch=word.batch), inner


def test_an_iterator_that_was_looked_into_once_and_is_held_is_not_the_training() -> None:
    """`it = iter(loader); next(it)`: it says the same batch for ever, and that steps were taken since."""
    rank = new_rank(None)
    held = Progress(0, 1, BATCHES, is_guess=True, began=rank.at)
    rank.say(held)
    rank.at += 1.0
    for word in rank.loop(True, 0):
        rank.say(replace(held, step=word.step, is_guess=False))
        if word.batch > 2:
            assert rank.history.phase.training == word
    rank.say(replace(held, step=rank.step, is_guess=False))
    assert rank.history.phase.training is not None
    assert rank.history.phase.training.batch == BATCHES


def test_a_loop_that_may_train_is_shown_only_while_nothing_else_is_known() -> None:
    rank = new_rank(None)
    guess = Progress(0, 1, 4, is_guess=True, began=rank.at)
    rank.say(guess)
    assert where(rank.history) == ["epoch 1", "batch 1/4", "step 0"]
    for _ in rank.loop(False, 0, 4):
        assert rank.history.phase.training is None
    rank.train(0)
    rank.say(replace(guess, began=rank.at))
    assert where(rank.history)[1] == f"batch {BATCHES}/{BATCHES}"


def test_a_loop_whose_steps_come_late_was_no_evaluation() -> None:
    """An accumulation by hand: four batches go by before the first step."""
    rank = new_rank(None)
    word = Progress(0, 2, BATCHES, is_training=False, began=rank.at)
    rank.say(word)
    rank.at += 3.0
    rank.say(replace(word, step=1, batch=5, is_training=True))
    assert rank.history.phase.evaluation is None
    assert where(rank.history) == ["epoch 1", "batch 5/8", "step 1", "62 % of this epoch"]


def test_an_evaluation_whose_end_was_lost_does_not_last_for_ever() -> None:
    rank = new_rank()
    rank.train(0)
    rank.say(Progress(rank.step, 2, 4, is_training=False, first=rank.step, began=rank.at))
    rank.at += 60.0
    rank.train(1)
    assert rank.history.phase.evaluation is None


# --- steps ------------------------------------------------------------------------------------------------------------


def test_steps_of_ranks_that_stay_are_those_of_the_cell() -> None:
    rank = new_rank()
    rank.step = 64
    rank.train(0)
    assert rank.history.steps == BATCHES


def test_a_phase_has_done_the_steps_that_all_ranks_have_done() -> None:
    history = History(2)
    for rank, step in enumerate((9, 7)):
        history.feed(rank, 1.0, Progress(0))
        history.feed(rank, 2.0, Progress(step))
    assert history.phase.steps == 7


def test_a_second_trainer_that_counts_from_0_again_adds_its_steps() -> None:
    count = StepCount()
    for first, steps in ((5, (6, 10)), (0, (0, 3))):
        for step in steps:
            count.take(Progress(step, first=first))
    assert count.done == 5 + 3


def test_batches_that_a_resumed_run_passes_over_are_no_steps() -> None:
    count = StepCount()
    count.take(Progress(4, first=4, is_guess=True))  # at the head of the epoch that was under way
    count.resume()
    count.take(Progress(7, first=7))
    count.take(Progress(9, batch=5, first=7, is_training=True))
    count.resume()  # in the midst of a training it changes nothing
    assert count.done == 2


# --- properties -------------------------------------------------------------------------------------------------------

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, BATCHES)),
        st.tuples(st.just("evaluate"), st.integers(0, 4)),
        st.tuples(st.just("evaluate inside"), st.integers(1, BATCHES)),
        st.tuples(st.just("attempt"), st.just(0)),
        st.tuples(st.just("again"), st.just(0)),
    ),
    max_size=12,
)


@given(acts=ACTS, epochs=st.one_of(st.none(), st.integers(1, 4)))
def test_the_bar_never_goes_back_while_its_words_are_the_same(acts: list[tuple[str, int]], epochs: int | None) -> None:
    """Whatever a program does after what. An attempt, a training, or without a number of epochs an epoch is a new bar,
    and the words beside it say which it is; an epoch whose number comes again has no other words."""
    rank = new_rank(epochs)
    history = rank.history
    seen: list[tuple[tuple[object, ...], float]] = []
    epoch = loops = 0

    def look() -> None:
        value, phase = history.phase.bar.value, history.phase
        if value is not None:
            number = loops if phase.bar.of else phase.trainings
            seen.append(((history.attempts, phase.bar.of, number), value))
            assert 0.0 <= value <= 1.0
            is_named = phase.training is not None or phase.evaluation is not None
            assert is_named == any(words.endswith(" %") or " % of " in words for words in where(history))
        if phase.left is not None:
            assert phase.left.seconds >= 0.0
        assert history.steps >= 0

    for act, number in acts:
        match act:
            case "train" | "evaluate inside":
                loops += 1
                for word in rank.loop(True, epoch):
                    look()
                    if act == "evaluate inside" and word.batch == number:
                        for _ in rank.loop(False, 0, 3):
                            look()
                epoch += 1
            case "evaluate":
                loops += 1
                for _ in rank.loop(False, 0, number, batch_s=0.2):
                    look()
            case "attempt":
                rank.say(Restarted("memory ran out"))
                rank.step, epoch = 0, 0
            case "again":
                epoch = 0
        look()
    for (before, low), (after, high) in itertools.pairwise(seen):
        assert before != after or low <= high, (before, low, high)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans(), st.booleans()), max_size=30))
def test_a_bar_of_a_known_number_of_epochs_goes_back_for_a_new_training_alone(
    words: list[tuple[int, int, bool, bool]],
) -> None:
    course, bar = Course(), Bar()
    for at, (epoch, batch, trains, is_over) in enumerate(words):
        before = (bar.of, course.trainings, bar.value or 0.0)
        course.take(float(at), Progress(0, batch, 9, epoch, 4, is_training=trains, is_over=is_over), None)
        bar.follow(course)
        if (bar.of, course.trainings) == before[:2] and bar.of == "":
            assert (bar.value or 0.0) >= before[2]
