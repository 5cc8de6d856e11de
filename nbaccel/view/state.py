"""Facts and State: what is known of a run besides its history: its settings, and how it goes. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from nbaccel.view.words import duration, plural

__all__ = ["RUNNING", "Facts", "State"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that are settled before the run begins.

    title: the name of what runs, "Cell In[5]".  setting: in words, "2 x Tesla T4, fp16, accumulate 4".
    devices: by rank, "GPU 0"; empty for ranks on the host.
    plots: the curves to draw, "loss"; empty for the loss, or the first curve if there is none.
    """

    title: str = "run"
    setting: str = ""
    devices: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()

    def device(self, rank: int) -> str:
        """Return the name of the memory that `rank` runs out of first."""
        return self.devices[rank] if rank < len(self.devices) else "host"

    def shown(self, names: list[str]) -> list[str]:
        """Return those of the curves `names` that are to be drawn.

        >>> Facts().shown(["lr", "train_loss"]), Facts(plots=("acc",)).shown(["loss"])
        (['train_loss'], ['acc'])
        """
        if self.plots:
            return list(self.plots)
        losses = [name for name in names if name.lower().endswith("loss")]
        return (losses or names)[:1]


@dataclass(frozen=True, slots=True)
class State:
    """State of a run in one word, and its end in a sentence.

    word: "running", "stopping", "done", "failed" or "stopped".  sentence: empty while the run goes on.
    bars: the progress bars that its ranks draw now, a row each; an empty row keeps the place of one that is over.
    hint: a possible action, "Stop: interrupt the kernel".

    >>> State("done", "done in 0:41, 500 steps").is_over
    True
    """

    word: str
    sentence: str = ""
    bars: tuple[str, ...] = ()
    hint: str = ""

    @property
    def is_over(self) -> bool:
        return self.word in ("done", "failed", "stopped")

    @classmethod
    def ended(cls, word: str, seconds: float, steps: int, why: str = "", attempts: int = 1, kept: int = 0) -> State:
        """Return the state of a run that ended: its duration with all attempts, and the reason unless all is well.

        steps: the steps that the run has done and not lost.  kept: of these, steps of earlier attempts.

        >>> State.ended("done", 41.0, 500).sentence
        'done in 0:41, 500 steps'
        >>> State.ended("done", 41.0, 500, attempts=3).sentence
        'done in 0:41, 500 steps in the last of 3 attempts'
        >>> State.ended("failed", 2.0, 0, "rank 1, ValueError: 11 classes").sentence
        'failed after 2.0 s: rank 1, ValueError: 11 classes'
        """
        sentence = f"{word} {'in' if word == 'done' else 'after'} {duration(seconds)}"
        done = plural(steps, "step") if steps else ""
        if attempts > 1:
            whence = f"in {attempts} attempts" if kept or not steps else f"in the last of {attempts} attempts"
            done = f"{done} {whence}".strip()
        return cls(word, ", ".join(filter(None, [sentence, done])) + (f": {why}" if why else ""))


RUNNING = State("running")
