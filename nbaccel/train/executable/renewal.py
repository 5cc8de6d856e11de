"""Renewal: continues a training in ranks whose process group was aborted in the task before. Runs in ranks, by all.

Persistent ranks may be anywhere in their program when one of them fails: with one step more than the others, with a
scheduler that has moved, with half of a sum in their weights. One rank is known to be in the state after its last
complete step. So all ranks copy from it what training needs: weights, buffers and optimizers at the next forward of
each DDP module, and small values at once. Other data of the program (an average of weights, a list) stay each rank's.
"""

from __future__ import annotations

from typing import Any

from nbaccel.aborting import abort_device_groups
from nbaccel.errors import PeerFailed
from nbaccel.train.executable.survivors import Survivors
from nbaccel.train.talk.process_group import process_group

__all__ = ["renew"]

_ABORT_S = 30.0


def renew(source: int, number: int) -> None:
    """Form the default group again, and continue what was prepared with the state of rank `source`. Collective.

    number: a number that no renewal before had.

    Raises:
        PeerFailed: this rank's device does not release the old group, or what was made cannot join the new one.
    """
    if not abort_device_groups(_ABORT_S):
        raise PeerFailed(
            f"this rank's device did not let go of its old process group within {_ABORT_S:g} s: %accelerate restart "
            "starts other ranks"
        )
    survivors = Survivors()
    survivors.clean_up()
    if survivors.obstacle:
        raise PeerFailed(
            f"the ranks cannot go on after they were cut short: {survivors.obstacle}. %accelerate restart begins anew"
        )
    place = process_group.meeting_place(f"renewal{number}")
    process_group.drop()
    process_group.renew(place.store)
    survivors.go_on(_take_over(survivors.steps, source), source)


def _take_over(steps: list[int], source: int) -> list[int]:
    """Copy small values from rank `source`; return how many training steps each of its Accelerators has done."""
    talk = process_group.talk
    if talk is None:  # a group of the program's own, and no Accelerator
        return steps
    trainings = [each._training() for each in process_group.users if each._everything_prepared and each._is_bound]
    counts = talk.announce("the ranks go on together", str(len(trainings)))
    if set(counts) - {"0", "1"} or len(set(counts)) > 1:
        raise PeerFailed(
            f"the ranks cannot go on after they were cut short: {', '.join(counts)} Accelerators have prepared "
            "something in them, by rank, and only one can be followed. %accelerate restart begins anew"
        )
    states: list[Any] = [steps, *map(_state, trainings)]
    talk.broadcast_objects(states, source)
    for training, state in zip(trainings, states[1:], strict=True):
        _restore(training, state)
    taken: list[int] = states[0]
    return taken


def _state(training: Any) -> dict[str, Any]:
    prepared = training.prepared
    return {
        "groups": [[_without_parameters(group) for group in each.param_groups] for each in prepared.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
        "precision": training.precision.state_dict(),
        "epochs": [loader.iteration for loader in prepared.loaders],
    }


def _restore(training: Any, state: dict[str, Any]) -> None:
    prepared = training.prepared
    for optimizer, groups in zip(prepared.optimizers, state["groups"], strict=True):
        for own, theirs in zip(optimizer.param_groups, groups, strict=True):
            own.update(theirs)
    for scheduler, theirs in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(theirs)
    if state["precision"]:
        training.precision.load_state_dict(state["precision"])
    for loader, epoch in zip(prepared.loaders, state["epochs"], strict=True):
        loader.iteration = epoch


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
