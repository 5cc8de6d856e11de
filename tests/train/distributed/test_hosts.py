"""Groups of two backends: the host's words go by gloo, and the device hears nothing of them."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel.base.events import Event, Waiting, outlet
from nbaccel.base.world import World
from nbaccel.errors import CollectiveMismatch
from nbaccel.launching.rank.separate_trainings import sequence_number
from nbaccel.testing import run_ranks
from nbaccel.train import PartialState
from nbaccel.train.data.dispatch import _BATCH, _Payload, _Wire
from nbaccel.train.data.order_comparison import OrderComparison
from nbaccel.train.distributed.collectives import CHECKED_CALLS, GroupCollectives
from nbaccel.train.distributed.process_group import GroupOptions, _fitting, _init, process_group
from nbaccel.train.distributed.transport import CollectivesSince

_CUDA = torch.device("cuda", 0)

_BOTH = "cpu:gloo,cuda:sham"


def _form() -> GroupCollectives:
    """The group that ranks with GPUs form, with a stand-in for NCCL that could only count what it is asked for."""

    def sham(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("sham", sham, devices=["cuda"])
    state = PartialState(backend=_BOTH)
    return GroupCollectives(_world(state.process_index), _CUDA)


def _world(rank: int) -> World:
    return World(rank, 2, rank, 2)


def _asked_of_the_device() -> int:
    return int(dist.group.WORLD._get_backend(_CUDA)._get_sequence_number_for_group())  # type: ignore[union-attr]


def _talks() -> list[Any]:
    talk = _form()
    rank = dist.get_rank()
    answers = [
        talk.any(rank == 1),
        talk.announce("a check", f"I am {rank}"),
        talk.gather_objects({"rank": [rank]}),
        talk.broadcast_objects([rank, "from"], 1),
        talk.tell("a count", torch.tensor([rank, 7])).tolist(),
        talk._sizes([rank + 3]),
    ]
    talk.agree("the same")
    for _ in range(CHECKED_CALLS + 1):  # the last ones are not compared
        talk.barrier()
    return [*answers, talk.device.type, _asked_of_the_device()]


def test_words_of_the_host_and_barriers_do_not_ask_the_device() -> None:
    said = [True, ["I am 0", "I am 1"], {"rank": [0, 1]}, [1, "from"], [[0, 7], [1, 7]], [[3, 4]]]
    assert run_ranks(2, _talks) == [[*said, "cuda", 0]] * 2


def _is_deserted() -> tuple[str, str]:
    talk = _form()

    def answer(event: Event) -> None:
        if isinstance(event, Waiting):
            raise CollectiveMismatch(f"{event.call}: nobody comes")

    if dist.get_rank():
        return "", ""
    with outlet(answer), pytest.raises(CollectiveMismatch) as caught:
        talk.any(True, "a question")
    return str(caught.value), talk._transport._where()


def test_a_wait_of_the_host_says_where_it_is_and_can_be_ended() -> None:
    where = "a question (call 1 of this process group)"
    assert run_ranks(2, _is_deserted)[0] == (f"{where}: nobody comes", where)


def _meets() -> list[Any]:
    talk = _form()
    world = _world(dist.get_rank())
    meetings, loaders = CollectivesSince(world, counts_anyway=False), [OrderComparison("a loader", world)]
    seen = [meetings.are_counted, meetings.look()]
    before = sequence_number()
    talk.barrier()
    loaders.append(OrderComparison("another loader", world))
    assert before is not None
    return [*seen, meetings.look(), sequence_number() == before + 1, loaders[0]._key != loaders[1]._key]


def test_collectives_of_either_backend_count_as_meetings() -> None:
    assert run_ranks(2, _meets) == [[True, False, True, True, True]] * 2


def _deals() -> Any:
    _form()
    world = _world(dist.get_rank())
    wire = _Wire(_CUDA, world, keeps_on_host=False)
    if world.is_main_process:
        wire.send(_BATCH, [_Payload.pack({"x": torch.arange(3), "name": "a"})], True, 2, 3)
        return _asked_of_the_device()
    kind, part, *numbers = wire.receive()
    return (kind, part["x"].tolist(), str(part["x"].device), part["name"], *numbers), _asked_of_the_device()


def test_batches_that_rank_0_reads_go_from_host_to_host() -> None:
    assert run_ranks(2, _deals) == [0, ((_BATCH, [0, 1, 2], "cpu", "a", True, 2, 3), 0)]


def _is_formed_again() -> tuple[str, bool]:
    _form()
    place = process_group.meeting_place()
    process_group.drop()
    process_group.renew(place.within("again").store)
    return dist.get_backend(), GroupCollectives(_world(dist.get_rank()), _CUDA).any(dist.get_rank() == 1)


def test_a_group_of_two_backends_is_formed_again_as_it_was() -> None:
    assert run_ranks(2, _is_formed_again) == [(_BOTH, True)] * 2


# -- which group is formed


@pytest.mark.parametrize(
    ("device", "local_world_size", "backend"),
    [("cuda", "4", "cpu:gloo,cuda:nccl"), ("cuda", "2", "nccl"), ("cuda", "", "nccl"), ("cpu", "4", "gloo")],
)
def test_ranks_with_gpus_that_were_said_to_be_in_one_machine_have_two_backends(
    device: str, local_world_size: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    assert _fitting(torch.device(device, 0), World(0, 4, 0, 4)) == backend


@pytest.mark.parametrize(
    ("backend", "waits"),
    [
        ("nccl", []),
        ("cpu:gloo,cuda:nccl", ["cpu"]),
        ("cuda:nccl,cpu:gloo", ["cpu"]),
        ("gloo", ["barrier"]),
        (None, []),
    ],
)
def test_connections_of_the_host_stand_when_a_group_is_formed(
    backend: str | None, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *names, **options: None)
    monkeypatch.setattr(dist, "barrier", lambda: asked.append("barrier"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: asked.append(tensor.device.type))
    _init(backend, None, 0, 2, timedelta(seconds=1), _CUDA)
    assert asked == waits


@pytest.mark.parametrize(("asked", "is_there"), [("nccl", True), ("gloo", True), (None, True), ("mpi", False)])
def test_a_backend_that_is_one_of_two_is_there(asked: str, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process_group.warn_of_others(GroupOptions(backend=asked))
    assert [str(warning.message)[:56] for warning in caught] == (
        [] if is_there else ["the process group exists already, without backend=mpi. A"]
    )
