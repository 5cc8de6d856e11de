"""Sharded tensors leave ranks as rows: only those, without an exchange, and joined only where they belong together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel.launching.ipc.reports import RankReport
from nbaccel.launching.ipc.spec import Results
from nbaccel.launching.processes.joined_tensors import JoinedTensors
from nbaccel.launching.rank.sharded_results import sharded_tensors
from nbaccel.namespace.payload import pack_what_can_travel, rows_in, unpack_what_can_be_rebuilt
from nbaccel.namespace.sharded_tensors import RowsReport, ShardedTensors
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.partial_state import PartialState

pytestmark = pytest.mark.slow

WIDTH = 4096

WITH_FSDP = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP of torch 2.6 runs on devices with streams only"
)


def sent(values: dict[str, Any], parts: dict[str, Any], steps: int = 0) -> tuple[bytes, dict[str, str], dict[str, Any]]:
    """What this rank sends: the payload, names that it refuses, and its report of rows."""
    payload, refused = pack_what_can_travel(
        values,
        as_written=True,
        sharded=sharded_tensors(Results(values, parts=parts), PartialState().num_processes),
    )
    try:
        return os.pread(payload.fd, payload.nbytes, 0), refused, RowsReport(steps, is_inside=False, lost="")._asdict()
    finally:
        os.close(payload.fd)


@contextmanager
def arrived(ranks: list[tuple[bytes, dict[str, str], dict[str, Any]]]) -> Iterator[list[RankReport]]:
    reports = []
    for data, _, rows in ranks:
        fd = os.memfd_create("test")
        os.write(fd, data)
        reports.append(RankReport("ok", fd, facts={"rows": rows}))
    try:
        yield reports
    finally:
        for report in reports:
            report.close()


def joined(
    ranks: list[tuple[bytes, dict[str, str], dict[str, Any]]], checkpoint: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of rank 0 as the kernel has them, and the names that cannot be joined."""
    with arrived(ranks) as reports:
        tensors = JoinedTensors(reports, checkpoint)
        try:
            return unpack_what_can_be_rebuilt(reports[0].payload_fd, joined=tensors)
        finally:
            tensors.close()


def model_of(rows: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False))
    model[1].weight = model[0].weight
    model.register_parameter("frozen", nn.Parameter(torch.randn(5, WIDTH), requires_grad=False))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def stepped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter) * parameter
        optimizer.step()


@WITH_FSDP
@pytest.mark.parametrize(("ranks", "rows"), [(2, 11), (4, 3)])
def test_rows_leave_without_an_exchange_and_nothing_but_rows_leaves_the_other_ranks(ranks: int, rows: int) -> None:
    def leave() -> Any:
        from torch.distributed.tensor.debug import CommDebugMode

        rank = PartialState().process_index
        model, optimizer = model_of(rows)
        stepped(model, optimizer)
        values = {"model": model, "optimizer": optimizer}
        group = torch.distributed.distributed_c10d._get_default_group()
        before = group._get_sequence_number_for_group()
        with CommDebugMode() as exchanges:
            data, refused, report = sent(values, {}) if rank == 0 else sent({}, values)
        entered = group._get_sequence_number_for_group() - before, exchanges.get_total_counts()
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        assert group._get_sequence_number_for_group() > before  # it counts what gathers
        own = sum(p.to_local().nbytes for p in model.parameters())
        own += sum(s.to_local().nbytes for each in optimizer.state.values() for n, s in each.items() if n != "step")
        return (data, refused, report), entered, whole, own

    found = run_ranks(ranks, leave)
    assert [entered for _, entered, _, _ in found] == [(0, 0)] * ranks
    for (data, _, _), _, _, own in found[1:]:
        assert own <= len(data) <= own + 4 * 4096 + 2048  # rows that begin at a page, and the table
    values, refused = joined([each for each, _, _, _ in found])
    assert refused == {}
    model, optimizer = values["model"], values["optimizer"]
    assert type(model) is nn.Sequential
    assert all(torch.equal(value, found[0][2][name]) for name, value in model.state_dict().items())
    assert model[1].weight is model[0].weight
    assert not model.frozen.requires_grad
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].shape == model[0].weight.shape


@WITH_FSDP
def test_an_optimizer_alone_finds_its_state_by_its_parameters() -> None:
    def leave() -> Any:
        rank = PartialState().process_index
        model, optimizer = model_of(11)
        stepped(model, optimizer)
        whole = [value["exp_avg"].full_tensor() for value in optimizer.state.values()]
        values = {"optimizer": optimizer}
        return sent(values, {}) if rank == 0 else sent({}, values), whole

    found = run_ranks(2, leave)
    values, refused = joined([each for each, _ in found])
    assert refused == {}
    assert all(
        torch.equal(value["exp_avg"], whole)
        for value, whole in zip(values["optimizer"].state.values(), found[0][1], strict=True)
    )


def rows_of(tensor: Callable[[], Any], **there: Any) -> list[Any]:
    """What two ranks send of one tensor, which the second has under the same name unless `there` has others."""

    def leave() -> Any:
        rank = PartialState().process_index
        values = {"x": tensor()}
        return sent(values, {}) if rank == 0 else sent({}, there or values)

    return run_ranks(2, leave)


def shard(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    return distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(11, 3), (1,), (0, 2)])
def test_every_plain_type_is_joined_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values, refused = joined(rows_of(lambda: shard(shape, dtype)))
    assert refused == {}
    expected = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    assert values["x"].dtype == dtype
    assert torch.equal(values["x"], expected)


def test_a_tensor_in_a_set_is_refused_for_sets_have_no_order() -> None:
    found = rows_of(lambda: {shard((4,))})
    assert found[0][1]["x"].startswith("a tensor of it cannot be joined: it is in a place that is not searched")


def test_rows_of_different_steps_are_never_joined_and_the_newest_checkpoint_is_named() -> None:
    first, (data, refused, report) = rows_of(lambda: shard((4,)))
    _, why = joined([first, (data, refused, report | {"steps": 1})], "checkpoints/step-7")
    assert why == {
        "x": "ranks stopped at different steps: rank 0 after 0, rank 1 after 1; newest checkpoint: checkpoints/step-7"
    }
    _, why = joined([first, (data, refused, report | {"is_inside": True})])
    assert why == {"x": "rank 1 stopped in the middle of an optimizer step"}
    _, why = joined([first, (data, refused, report | {"lost": "spoilt"})])
    assert why == {"x": "rank 1: spoilt"}


def test_a_rank_with_other_or_no_rows_is_named() -> None:
    _, why = joined(rows_of(lambda: shard((4,)), y=1))
    assert why["x"].startswith("rank 1 has no rows for x where the others have some")
    whole, (data, refused, report) = rows_of(lambda: shard((4,))), rows_of(lambda: shard((6,)))[1]
    _, why = joined([whole[0], (data, refused, report)])
    assert why == {"x": "the ranks have tensors of x that are no parts of one"}


def test_a_process_without_sharded_tensors_searches_and_sends_nothing() -> None:
    assert not len(ShardedTensors({"x": [torch.ones(2), {"y": 1}]}, 1))
    payload, _ = pack_what_can_travel({"x": 1}, as_written=True, sharded=ShardedTensors({"x": 1}, 1))
    try:
        assert rows_in(payload.fd) == {}
    finally:
        os.close(payload.fd)
