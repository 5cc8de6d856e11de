"""Memory of one training step on one rank, by strategy: replays the moments of a step. Runs anywhere; pure arithmetic.

A `StepSchedule` says in which order a step gathers, computes and frees, and what autograd holds meanwhile; it comes
from a step with tensors that have no memory (`fake_step`), or, without a batch, from the order of the groups alone.
`replicated` and `sharded` follow it and add what the strategy holds: buckets of DDP; for FSDP a rank's rows, gathered
groups, and the buffers of its collectives, in the order in which torch 2.13 allocates and frees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from nbaccel.base.values import frozen

__all__ = ["Moment", "StepSchedule", "StepUse", "Weight", "replicated", "sharded", "without_batch"]


_NUMBERS = 4096
"""Bytes for the loss, norms, flags, and other single numbers that programs hold."""

_HELD_LONGER = 1.1
"""Factor of what comes and goes in a sharded step. When its buffers are freed differs from run to run, since the
threads of the process group hold them too: between equal steps of two ranks up to 3 % of the peak were counted."""


@frozen
class Weight:
    """One parameter, counted once however many modules use it.

    Args:
        group: Number of the FSDP group that gathers it.
        item_bytes: The bytes of an element as it is kept, with its gradient.
        gathered_item_bytes, reduced_item_bytes: Those of an element while FSDP computes with it, and sends its
            gradient.
    """

    shape: tuple[int, ...]
    is_trained: bool
    group: int = 0
    item_bytes: int = 4
    gathered_item_bytes: int = 4
    reduced_item_bytes: int = 4

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item_bytes

    def rows(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of one rank's rows: the first dimension divided by `ranks`, rounded up.

        Example:
            >>> Weight((11, 3), True).rows(2)
            (6, 3)
        """
        return (-(-self.shape[0] // ranks), *self.shape[1:]) if self.shape else ()

    def padded(self, ranks: int) -> int:
        """Return the elements of the rows of all ranks."""
        return ranks * prod(self.rows(ranks))


@frozen
class Moment:
    """A moment of a step, and the bytes that autograd holds from then to the next one.

    Args:
        kind: "gather" and "free", before and after the forward of a group; "loss", after the whole forward; "backward",
            before the backward of a group; "gradient", complete for one parameter; "reduce", after the backward of a
            group.
        nbytes: The size in bytes of the gradient; for "free" of an output that FSDP has to copy.
        activations: The most that is held until the next moment, without parameters and complete gradients.
    """

    kind: str
    group: int = 0
    nbytes: int = 0
    activations: int = 0


@frozen
class StepSchedule:
    """The moments of one step.

    Args:
        moments: In their order.
        root: Number of the last group, which holds what no other one has.
        buffers: Bytes of the model's buffers, whole on each rank.
        batch: Bytes that stay until the step ends.
    """

    moments: tuple[Moment, ...]
    weights: tuple[Weight, ...]
    root: int
    buffers: int = 0
    batch: int = 0

    @property
    def activations(self) -> int:
        return max((moment.activations for moment in self.moments), default=0)

    def gradients(self, ranks: int = 1) -> int:
        return sum(prod(each.rows(ranks)) * each.item_bytes for each in self.weights if each.is_trained)

    def parameters(self, ranks: int = 1) -> int:
        return sum(prod(each.rows(ranks)) * each.item_bytes for each in self.weights)


@frozen
class StepUse:
    """Bytes of one rank: the most of each part, and the peak of a step, which is at most their sum, and cuBLAS.

    Args:
        exchange: Buckets of DDP, or what FSDP has gathered and sends.
        temporaries: The bytes that the optimizer's step allocates for its own length.
    """

    parameters: int
    gradients: int
    states: int
    buffers: int
    exchange: int
    activations: int
    temporaries: int
    peak: int


def without_batch(weights: Sequence[Weight], root: int, buffers: int) -> StepSchedule:
    """Return a step that computes group after group and holds no activations.

    Args:
        root, buffers: Those of a `StepSchedule`.
    """
    moments = [Moment("gather", root)]
    for group in range(root):
        moments += [Moment("gather", group), Moment("free", group)]
    moments += [Moment("free", root), Moment("loss"), Moment("backward", root)]
    for group in range(root - 1, -1, -1):
        moments += [Moment("backward", group), *_gradients_of(weights, group), Moment("reduce", group)]
    return StepSchedule((*moments, *_gradients_of(weights, root)), tuple(weights), root, buffers)


def _gradients_of(weights: Sequence[Weight], group: int) -> list[Moment]:
    return [
        Moment("gradient", group, prod(each.shape) * each.gathered_item_bytes)
        for each in weights
        if each.group == group and each.is_trained
    ]


def replicated(
    schedule: StepSchedule, states: int, temporaries: int, *, buckets: bool, views: bool = False, keeps: bool = False
) -> StepUse:
    """Return what a rank uses that holds the whole model.

    Args:
        states, temporaries: Those of the optimizer.
        buckets: DDP's, as large as the gradients.
        views: Gradients are in them.
        keeps: Gradients are there from one batch to the next (accumulation).
    """
    parameters, gradients = schedule.parameters(), schedule.gradients()
    exchange = gradients if buckets else 0
    are_apart = not (buckets and views)
    held = gradients if keeps and are_apart else 0
    most = 0
    for moment in schedule.moments:
        if moment.kind == "gradient" and are_apart and not keeps:
            held += moment.nbytes
        most = max(most, held + moment.activations)
    most = max(most, (gradients if are_apart else 0) + temporaries + schedule.batch)
    return StepUse(
        parameters,
        gradients if are_apart else 0,
        states,
        schedule.buffers,
        exchange,
        schedule.activations,
        temporaries,
        peak=parameters + states + schedule.buffers + exchange + most + _NUMBERS,
    )


def sharded(
    schedule: StepSchedule,
    ranks: int,
    states: int,
    temporaries: int,
    *,
    reshards: bool = True,
    keeps: bool = False,
    on_cpu: bool = False,
) -> StepUse:
    """Return what one of `ranks` ranks uses under FSDP.

    Args:
        states, temporaries: Those of the optimizer of one rank's rows.
        reshards: False keeps gathered groups until the backward (ZeRO-2).
        keeps: As in `replicated`.
        on_cpu: Gradients of half precision are cast in a tensor of their own there before they are sent in fp32; CUDA
            has one kernel for both.
    """
    replay = _Replay(schedule, ranks, reshards, keeps, on_cpu)
    for moment in schedule.moments:
        replay.follow(moment)
    replay.finish()
    parameters, gradients = schedule.parameters(ranks), schedule.gradients(ranks)
    return StepUse(
        parameters,
        gradients,
        states,
        schedule.buffers,
        replay.most_exchanged,
        schedule.activations,
        temporaries,
        peak=parameters
        + states
        + schedule.buffers
        + int(_HELD_LONGER * max(replay.most, gradients + temporaries + schedule.batch))
        + _NUMBERS,
    )


class _Replay:
    """Bytes that FSDP holds besides a rank's rows and their optimizer states, while a step goes on."""

    def __init__(self, schedule: StepSchedule, ranks: int, reshards: bool, keeps: bool, on_cpu: bool) -> None:
        count = schedule.root + 1
        self._gathered, self._sent, self._cast, self._widened = ([0] * count for _ in range(4))
        for weight in schedule.weights:
            size = weight.padded(ranks)
            self._gathered[weight.group] += size * weight.gathered_item_bytes
            if weight.gathered_item_bytes != weight.item_bytes:
                self._cast[weight.group] += size // ranks * weight.gathered_item_bytes
            if weight.is_trained:
                self._sent[weight.group] += size * weight.reduced_item_bytes
                if on_cpu and weight.gathered_item_bytes != weight.reduced_item_bytes:
                    self._widened[weight.group] += size * weight.reduced_item_bytes
        self._root, self._ranks, self._reshards = schedule.root, ranks, reshards
        self._rows = [sent // ranks for sent in self._sent]
        self._keeps = keeps
        self._reduced = sum(self._rows) if keeps else 0
        self._whole: dict[int, int] = {}  # gathered groups, ready to compute with
        self._received: dict[int, int] = {}  # outputs of all-gathers
        self._last_received = 0  # the one before, kept in a forward so that copies and collectives may overlap
        self._gradients = [0] * count
        self._sending = 0
        self._order: list[int] = []  # groups as their forwards ended
        self._places: list[list[int]] = [[] for _ in range(count)]
        self._activations = 0
        self.most = self.most_exchanged = 0

    def follow(self, moment: Moment) -> None:
        self._note()
        group = moment.group
        match moment.kind:
            case "gather":
                self._gather(group)
            case "free":
                self._places[group].append(len(self._order))
                self._order.append(group)
                self._note(extra=moment.nbytes)
                if self._reshards and group != self._root:
                    self._whole.pop(group, None)
            case "loss":
                self._last_received = 0
            case "backward":
                self._gather_again(group)
            case "gradient":
                self._gradients[group] += moment.nbytes
            case "reduce":
                self._reduce(group)
        self._activations = moment.activations
        self._note()

    def finish(self) -> None:
        """Reduce what no moment has: the root, and groups whose inputs need no gradient."""
        self._activations = 0
        for group in range(self._root + 1):
            if self._gradients[group] or group in self._whole:
                self._reduce(group)

    def _gather(self, group: int) -> None:
        if group in self._whole:
            return
        self._receive(group)
        self._whole[group] = self._gathered[group]
        self._note()
        self._last_received = self._received.pop(group)

    def _receive(self, group: int) -> None:
        self._received[group] = self._gathered[group]
        self._note(extra=self._cast[group])  # the rows in the dtype of the computation, on their way

    def _gather_again(self, group: int) -> None:
        if group not in self._whole:
            if group not in self._received:
                self._receive(group)
            self._whole[group] = self._gathered[group]
            self._note()
            self._received.pop(group)
        if self._places[group] and (place := self._places[group].pop()):
            ahead = self._order[place - 1]  # the group whose forward came before: its backward comes next
            if ahead not in self._whole and ahead not in self._received:
                self._receive(ahead)

    def _reduce(self, group: int) -> None:
        self._whole.pop(group, None)
        self._sending = self._sent[group] if self._gradients[group] else self._sending
        self._note()
        if not self._gradients[group]:
            return
        # The whole gradients are there until what comes back is allocated: a loop of torch's still holds them.
        self._note(extra=max(self._rows[group], self._widened[group]))
        self._gradients[group] = 0
        if not self._keeps:
            self._reduced += self._rows[group]

    def _note(self, extra: int = 0) -> None:
        exchanged = sum(self._whole.values()) + sum(self._received.values()) + self._last_received + self._sending
        self.most_exchanged = max(self.most_exchanged, exchanged)
        held = exchanged + sum(self._gradients) + self._reduced
        self.most = max(self.most, held + self._activations + extra)
