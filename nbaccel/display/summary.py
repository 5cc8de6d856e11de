"""One run at one moment in words, as a block with every number and as one line. Pure; runs in the kernel.

The text serves screen readers, terminals, logs, and the saved file. Besides the history of the run it needs its
settings (`RunFacts`) and how it goes (`RunState`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbaccel.base.events import LoopKind, TrainingMode
from nbaccel.base.quantities import duration, gigabytes, listed, number, plural, rate, span
from nbaccel.display.history import History, Mark, Usage
from nbaccel.display.series import Series
from nbaccel.display.splits import is_accuracy, is_held_out, meant_by

__all__ = [
    "RUNNING",
    "RunFacts",
    "RunState",
    "curve_words",
    "few_numbers",
    "line",
    "loss_of_records",
    "mark_words",
    "paces",
    "text",
    "times",
    "where",
]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that are settled before the run begins.

    Args:
        title: The name of what runs, "Cell In[5]".
        setting: The setting in words, "2 x Tesla T4, seed 3".
        of_prepared: Settings of a prepared loop, in words: "fp16, accumulate 4".
        devices: The device of each rank, "GPU 0"; empty for ranks on the host.
        plots: The curves to draw, "loss"; empty for the loss, or the first curve if there is none.
        of_unmodified: Settings of an unmodified loop, in words.
    """

    title: str = "run"
    setting: str = ""
    devices: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()
    of_prepared: str = ""
    of_unmodified: str = ""

    def setting_of(self, history: History) -> str:
        """Return the setting as far as it is in force, and how the program trains, as far as that is known.

        Example:
            >>> from nbaccel.base.events import LoopKind, TrainingMode
            >>> history, facts = History(2), RunFacts(setting="2 ranks on the CPU", of_prepared="bf16")
            >>> history.feed(0, 1.0, TrainingMode(LoopKind.UNMODIFIED, is_split=True))
            >>> facts.setting_of(history)
            '2 ranks on the CPU, batches of this loop are split'
            >>> history.feed(0, 2.0, TrainingMode(LoopKind.PREPARED))
            >>> facts.setting_of(history)
            '2 ranks on the CPU, each rank has its own batches: prepared, bf16'
        """
        mode = history.mode
        words = [self.setting]
        if mode is not None:
            words.append(_mode_words(mode, history.world_size))
            settings: dict[str, str] = {LoopKind.PREPARED: self.of_prepared, LoopKind.UNMODIFIED: self.of_unmodified}
            words.append(settings.get(mode.kind, ""))
        return ", ".join(filter(None, words))

    def device(self, rank: int) -> str:
        """Return the name of the memory that `rank` runs out of first."""
        return self.devices[rank] if rank < len(self.devices) else "host"

    def shown(self, names: list[str]) -> list[str]:
        """Return those of the curves `names` that are to be drawn: the chosen ones, else a loss and an accuracy.

        A chosen one that is not among them is returned too: it may come.

        Example:
            >>> RunFacts().shown(["lr", "train_loss", "val/acc"]), RunFacts(plots=("acc",)).shown(["loss"])
            (['train_loss', 'val/acc'], ['acc'])
            >>> RunFacts(plots=("loss", "acc")).shown(["loss", "train/acc", "val/acc"])
            ['loss', 'train/acc', 'val/acc']
        """
        if self.plots:
            return list(dict.fromkeys(name for plot in self.plots for name in meant_by(plot, names) or [plot]))
        losses = sorted([name for name in names if name.lower().endswith("loss")], key=is_held_out)
        accuracies = sorted(filter(is_accuracy, names), key=is_held_out)
        return [*losses[:1], *accuracies[:1]] or sorted(names, key=is_held_out)[:1]

    def not_found(self, names: list[str]) -> str:
        """Return which chosen curves are not among `names`, and what there is; empty if all are.

        Example:
            >>> RunFacts(plots=("f1",)).not_found(["loss", "val/acc"])
            '--plot f1: nothing is called so; there is loss, val/acc'
        """
        unknown = ", ".join(plot for plot in self.plots if not meant_by(plot, names))
        return f"--plot {unknown}: nothing is called so; there is {listed(names) or 'no number'}" if unknown else ""


def _mode_words(mode: TrainingMode, world_size: int) -> str:
    if mode.is_split:
        return "batches of this loop are split"
    if mode.kind == LoopKind.PREPARED and world_size > 1:
        return "each rank has its own batches: prepared"
    return mode.kind


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run in one word, and its end in a sentence.

    Args:
        word: "running", "stopping", "done", "failed" or "stopped".
        sentence: How the run ended; empty while it goes on.
        is_written: Whether the sentence is also written as a line, however short the run was.
        bars: The progress bars that its ranks draw now, a row each; an empty row keeps the place of one that is over.
        hint: What the user may do, "Stop: interrupt the kernel".

    Example:
        >>> RunState("done", "done in 41 s, 500 steps").is_over
        True
    """

    word: str
    sentence: str = ""
    bars: tuple[str, ...] = ()
    hint: str = ""
    is_written: bool = False

    @property
    def is_over(self) -> bool:
        return self.word in ("done", "failed", "stopped")

    @classmethod
    def ended(cls, word: str, seconds: float, steps: int, why: str = "", attempts: int = 1, kept: int = 0) -> RunState:
        """Return the state of a run that ended: its duration with all attempts, and the reason unless all is well.

        Args:
            steps: The steps that the run has done and not lost.
            kept: Of these, steps of earlier attempts.

        Example:
            >>> RunState.ended("done", 41.0, 500).sentence
            'done in 41 s, 500 steps'
            >>> RunState.ended("done", 41.0, 500, attempts=3).sentence
            'done in 41 s, 500 steps in the last of 3 attempts'
            >>> RunState.ended("failed", 2.0, 0, "rank 1, ValueError: 11 classes").sentence
            'failed after 2 s: rank 1, ValueError: 11 classes'
        """
        sentence = f"{word} {'in' if word == 'done' else 'after'} {duration(seconds)}"
        done = plural(steps, "step") if steps else ""
        if attempts > 1:
            whence = f"in {attempts} attempts" if kept or not steps else f"in the last of {attempts} attempts"
            done = f"{done} {whence}".strip()
        return cls(word, ", ".join(filter(None, [sentence, done])) + (f": {why}" if why else ""))


RUNNING = RunState("running")


_LATEST_MARKS = 5
_MUCH_WAITING = 0.25
_SHORTEST_EPOCH_S = 1.0
_FEW = 3
"""Number of values in the line of a run; the panel and the history have all of them."""
_BOOKKEEPING = ("epoch", "runtime", "per_second", "flos", "grad_norm", "learning_rate", "lr", "step", "num_tokens")
"""Ends of the names that trainers log beside their measurements."""


def line(history: History, facts: RunFacts, seconds: float, state: RunState = RUNNING) -> str:
    """Return the run in one line.

    Example:
        >>> from nbaccel.base.events import Metric
        >>> history = History(1)
        >>> history.feed(0, 1.0, Metric({"acc": 0.5}, step=3))
        >>> line(history, RunFacts("Cell In[5]"), seconds=12.0)
        '4 steps, acc 0.5000, 12 s'
    """
    words = [state.sentence] if state.sentence else []
    words += _where_now(history, state)
    words += few_numbers(history, facts)
    words += times(history, seconds, state)
    if usages := list(history.memory.values()):
        sizes = [usage.peak_bytes if state.is_over else usage.used_bytes for usage in usages]
        limits = {usage.limit_bytes for usage in usages if usage.is_device and usage.limit_bytes}
        of = f" of {span(sorted(limits))}" if limits else ""
        words.append(f"{'peak memory' if state.is_over else 'memory'} {span(sizes)}{of}")
    nothing = facts.not_found(history.names) if state.is_over else ""
    return "; ".join(filter(None, [", ".join(words), nothing]))


def few_numbers(history: History, facts: RunFacts) -> list[str]:
    """Return the numbers for one line: losses first, then measurements; and how many more there are.

    A Trainer of transformers logs 15 numbers, half of them times of its own.
    """
    series = history.phase.series
    if len(series) <= _FEW:
        names = list(series)
    else:
        drawn = [name for name in facts.plots if name in series]
        losses = [name for name in series if name.lower().endswith("loss")]
        others = [name for name in series if not name.endswith(_BOOKKEEPING)]
        names = list(dict.fromkeys([*drawn, *losses, *others]))[:_FEW]
    more = len(series) - len(names)
    words = [f"{name} {number(series[name].latest)}" for name in names]
    return [*words, f"{plural(more, 'more number')}"] if more else words


def text(history: History, facts: RunFacts, seconds: float, state: RunState = RUNNING) -> str:
    """Return the run in a few lines, with every number."""
    return "\n".join(filter(None, _lines(history, facts, seconds, state)))


def _lines(history: History, facts: RunFacts, seconds: float, state: RunState) -> Iterator[str]:
    yield f"{facts.title}: {state.sentence or state.word}"
    yield facts.setting_of(history)
    yield ", ".join([*_where_now(history, state), *times(history, seconds, state), *paces(history, state)])
    for name, series in history.phase.series.items():
        yield curve_words(name, series)
    for rank in range(history.world_size):
        words = [] if history.items is None else history.items.words_of(rank)
        words += [] if state.word == "done" else [lag_words(history, rank)]  # then all have come to the end
        if rank in history.memory:
            words += [_memory_words(history.memory[rank], facts.device(rank), with_peak=True)]
        yield f"rank {rank}: {', '.join(filter(None, words))}" if any(words) else ""
    yield from (mark_words(mark) for mark in history.marks[-_LATEST_MARKS:])
    yield loss_of_records(history)
    yield from state.bars


def _where_now(history: History, state: RunState) -> list[str]:
    """Return the position of the run, except for parts that the sentence of its end already says."""
    phase = history.phase
    words = where(history)
    if state.is_over and history.items is not None:
        return []
    if state.word == "done" or (state.is_over and phase.training is None and phase.evaluation is None):
        words = [phase.name] if phase.name else []
    return [word for word in words if not state.is_over or word != _attempt(history)]


def where(history: History) -> list[str]:
    """Return the progress of the run: ["epoch 2/3", "batch 148/500", "step 648", "43 %"].

    During an evaluation the position of the training, which waits, comes first: ["epoch 1/2", "step 38", "50 %",
    "evaluating, batch 5/8"]. The step is the training's own number, that of its checkpoints and its curves.
    """
    phase = history.phase
    training, evaluation = phase.training, phase.evaluation
    words = [*_which(history), *([] if history.items is None else history.items.words())]
    percent = (
        [] if phase.bar.value is None else [f"{phase.bar.value * 100:.0f} %{phase.bar.of and f' of {phase.bar.of}'}"]
    )
    if training is not None:
        has_loader = training.batch > 0 or training.batches is not None
        words += [f"epoch {_of(training.epoch + 1, training.epochs)}"] if has_loader else []
        words += [f"batch {_of(training.batch, training.batches)}"] if has_loader and not evaluation else []
        words += [f"step {training.step:,}", *percent]
    if evaluation is not None:
        words.append(f"evaluating, batch {_of(evaluation.batch, evaluation.batches)}")
        words += percent if training is None else []
    elif training is None and phase.steps:
        words.append(plural(phase.steps, "step"))
    return words


def _which(history: History) -> Iterator[str]:
    """Yield the attempt, phase and training of the run, if there are several."""
    name = history.phase.name
    if history.attempts > 1 and name != _attempt(history):
        yield _attempt(history)
    if name:
        yield name
    if history.phase.trainings > 1:
        yield f"training {history.phase.trainings}"


def _attempt(history: History) -> str:
    return f"attempt {history.attempts}"


def _of(done: int, of: int | None) -> str:
    return f"{done:,}" if of is None else f"{done:,}/{of:,}"


def times(history: History, seconds: float, state: RunState = RUNNING) -> list[str]:
    """Return speed, time so far and time left: ["12.4 steps/s", "12.1 s", "28 s left"]; only the speed after the end.

    If the loop waits for batches much of its time, that is added: "45 % of it waiting for data".
    """
    words = []
    if (steps_per_s := history.steps_per_s) is not None:
        words.append(rate(steps_per_s, "steps"))
    if state.is_over:
        return words
    items = [] if history.items is None else history.items.times()
    words += [*items[:1], duration(seconds), *items[1:]]
    training = history.phase.training
    if training is not None and training.waiting is not None and training.waiting >= _MUCH_WAITING:
        words.append(f"{training.waiting * 100:.0f} % of it waiting for data")
    if (left := history.phase.left) is not None:
        least, epoch = "at least " if left.is_least else "", " in this epoch" if left.of_epoch else ""
        words.append(f"{least}{duration(left.seconds)} left{epoch}")
    return words


def paces(history: History, state: RunState = RUNNING) -> list[str]:
    """Return samples per second, time per epoch and learning rate: ["397 samples/s", "41.3 s per epoch", "lr 0.0003"].

    After the end the learning rate is left out.
    """
    phase = history.phase
    words = []
    if (samples_per_s := phase.samples_per_s) is not None:
        words.append(rate(samples_per_s, "samples"))
    if (epoch_s := phase.epoch_s) is not None and epoch_s >= _SHORTEST_EPOCH_S:
        words.append(f"{duration(epoch_s)} per epoch")
    training = phase.training
    if training is not None and training.learning_rates and not state.is_over:
        words.append(f"lr {' and '.join(f'{each:.3g}' for each in training.learning_rates)}")
    return words


def curve_words(name: str, series: Series) -> str:
    """Return the latest value of a curve, that of each rank, its lowest and highest, and where it was not finite."""
    details = []
    if len(series.last) > 1:
        details += [f"rank {rank} {number(value)}" for rank, value in sorted(series.last.items())]
    if series.buckets > len(series.ranks):
        details.append(f"lowest {number(series.lowest)}, highest {number(series.highest)}")
    if series.not_finite:
        details.append(not_finite_words(series))
    return f"{name} {number(series.latest)}" + (f" ({', '.join(details)})" if details else "")


def not_finite_words(series: Series) -> str:
    """Return the first step with a value that is not finite, and its rank."""
    step, rank = min((step, rank) for rank, step in series.not_finite.items())
    return f"not finite since step {step:,}{f' on rank {rank}' if len(series.ranks) > 1 else ''}"


def _memory_words(usage: Usage, device: str, with_peak: bool = False) -> str:
    """Return the memory of a device in words.

    Example:
        >>> _memory_words(Usage(True, 9_100_000_000, 11_200_000_000, 14_700_000_000), "GPU 0", with_peak=True)
        'GPU 0 9.1 of 14.7 GB, peak 11.2 GB'
    """
    used = gigabytes(usage.used_bytes)
    if usage.limit_bytes:
        used = f"{used.removesuffix(' GB')} of {gigabytes(usage.limit_bytes)}"
    return f"{device} {used}" + (f", peak {gigabytes(usage.peak_bytes)}" if with_peak else "")


def lag_words(history: History, rank: int) -> str:
    """Return by how many steps a rank is ahead or behind; empty if it is not."""
    ahead = history.phase.lag(rank)
    return f"{plural(abs(ahead), 'step')} {'ahead' if ahead > 0 else 'behind'}" if ahead else ""


def mark_words(mark: Mark) -> str:
    """Return a mark in words, with its step and rank."""
    who = "" if mark.rank is None else f"rank {mark.rank} "
    return f"{'' if mark.step is None else f'step {mark.step:,}: '}{who}{mark.text}"


def loss_of_records(history: History) -> str:
    """Return a sentence if some records never arrived; else an empty text."""
    lost = history.lost
    return f"{plural(lost, 'record')} did not arrive: the curves have gaps, the training has none" if lost else ""
