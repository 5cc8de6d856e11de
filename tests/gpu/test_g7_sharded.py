"""G7: models that are sharded over two ranks by NCCL: numbers, batches that are repeated, memory.

A step is abandoned otherwise than on the host: gathers are queued on the device behind work that no peer joins any
more, and sums of the step before may still be under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G7"

pytestmark = [pytest.mark.gpu, pytest.mark.nccl2, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.takes(30)
def test_the_programs_of_conformance_train_as_in_one_process(program: Callable[..., Any], two_ranks: str) -> None:
    for name, found in program("sharded.py", "conform").items():
        limit = 3e-2 if name in ("fp16", "bf16") else 1e-4
        assert found["largest"] <= limit, (name, found)
        assert not found["other"], (name, found)


@pytest.mark.takes(38)
def test_a_batch_that_did_not_fit_is_repeated_on_both_ranks(program: Callable[..., Any], two_ranks: str) -> None:
    told = program("sharded.py", "repeated")
    failed = {place: found for place, found in told.items() if "error" in found}
    assert not failed
    assert max(found["off"] for found in told.values()) <= 1e-5, told
    fired = {place: sum(found["fired"]) for place, found in told.items()}
    assert fired == {**dict.fromkeys(told, 1), "nothing": 0, "both ranks": 2, "rank 0, twice": 2}
    assert max(found["slowest_s"] for found in told.values()) <= 10, told


@pytest.mark.takes(9)
def test_sums_of_the_step_before_are_whole_when_the_next_is_abandoned(
    program: Callable[..., Any], two_ranks: str
) -> None:
    found = program("sharded.py", "ahead")
    assert found["behind"][0] == [True], "rank 0's device was not behind: nothing was shown"
    assert found["off"] <= 1e-5, found


@pytest.mark.takes(40)
def test_a_rank_with_less_memory_makes_all_of_them_go_on_in_smaller_parts(
    program: Callable[..., Any], two_ranks: str
) -> None:
    told = program("sharded.py", "short")
    assert not {name: found for name, found in told.items() if isinstance(found, str)}
    roomy, tight = told["step"]
    assert tight["failed"], "the second rank had enough memory"
    assert roomy["losses"] == tight["losses"]
    roomy, tight = told["function"]
    assert len(tight["tried"]) > 1, "the second rank had enough memory"
    assert roomy == tight
    roomy, tight = told["search"]
    assert roomy["size"] == tight["size"] >= 4


@pytest.mark.takes(50)
def test_a_rank_that_asks_alone_ends_with_the_lines_of_both(program: Callable[..., Any], two_ranks: str) -> None:
    """On the card nothing holds the host in a gather that the peer does not enter, and it would end with half of it."""
    for what, found in program("sharded.py", "alone").items():
        assert "in _asked_alone" in found["error"], (what, found)
        assert "rank 0: " in found["error"], (what, found)
        assert found["took_s"] < 38, (what, found)


@pytest.mark.takes(27)
def test_an_estimate_is_not_below_what_the_card_counts(program: Callable[..., Any], two_ranks: str) -> None:
    told = program("sharded.py", "memory")
    for name, ranks in told.items():
        for rank in ranks:
            assert rank["counted_mb"] <= rank["estimated_mb"] <= 1.15 * rank["counted_mb"], (name, ranks)
    by_fsdp, by_ddp = (max(rank["counted_mb"] for rank in told[name]) for name in ("fsdp, no", "ddp, no"))
    assert by_fsdp < by_ddp
