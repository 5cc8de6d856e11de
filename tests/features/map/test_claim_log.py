"""Claims: no item is claimed by two living workers, and none is lost with a dead one."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from features.map.forks import ended, fork, kill
from nbaccel.features.map.claim_log import Claim, ClaimLog, LifeLock
from nbaccel.features.map.records import AnswerRecord, RecordFile


def worker(folder: Path, total: int | None = 10, order: list[int] | None = None) -> ClaimLog:
    claims = ClaimLog(folder, total, order)
    claims.enter()
    return claims


def all_of(claims: ClaimLog, most: int = 3) -> list[int]:
    """Claim until there is nothing more; return the items."""
    found: list[int] = []
    while (claim := claims.claim(most)) is not None and claim.indices:
        found += claim.indices
    return found


def dies_with_a_claim(folder: Path, most: int, answers: int = 0, total: int = 10) -> None:
    """A worker claims, answers the first of its items, and is killed."""

    def claim() -> None:
        claims = ClaimLog(folder, total)
        name = claims.enter()
        (folder / "records").mkdir(exist_ok=True)
        indices = claims.claim(most).indices  # type: ignore[union-attr]
        if answers:
            RecordFile(folder / "records" / name).append([AnswerRecord(item, b"x") for item in indices[:answers]])
        (folder / "claimed").touch()
        time.sleep(60)

    pid = fork(claim)
    while not (folder / "claimed").exists():
        time.sleep(0.01)
    kill(pid)
    (folder / "claimed").unlink()


def test_two_workers_share_the_items(tmp_path: Path) -> None:
    one, two = worker(tmp_path), worker(tmp_path)
    found: list[list[int]] = [[], []]
    for turn in range(10):
        claim = (one, two)[turn % 2].claim(2)
        found[turn % 2] += claim.indices if claim is not None else []
    assert found == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    assert one.claim(2) is None
    assert two.claim(2) is None


def test_items_are_claimed_in_the_given_order(tmp_path: Path) -> None:
    assert all_of(worker(tmp_path, 4, [2, 0, 3, 1])) == [2, 0, 3, 1]


def test_a_worker_waits_while_another_one_works(tmp_path: Path) -> None:
    one, two = worker(tmp_path), worker(tmp_path)
    assert one.claim(10) == Claim(range(10))
    assert two.claim(10) == Claim()
    one.claim(10)
    assert two.claim(10) is None


def test_items_of_a_dead_worker_are_claimed_again_unless_it_has_answered_them(tmp_path: Path) -> None:
    dies_with_a_claim(tmp_path, 4, answers=1)
    assert sorted(all_of(worker(tmp_path))) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_claim_that_killed_its_worker_is_claimed_in_smaller_parts_and_at_last_alone(tmp_path: Path) -> None:
    dies_with_a_claim(tmp_path, 20, total=20)  # all of them
    dies_with_a_claim(tmp_path, 20, total=20)  # an eighth of them
    claims, sizes, found = worker(tmp_path, 20), [], []
    while (claim := claims.claim(20)) is not None:
        sizes.append(len(claim.indices))
        found += claim.indices
    assert max(sizes) == 2
    assert sizes[-2:] == [1, 1]
    assert sorted(found) == list(range(20))
    assert found[-2:] == [0, 1]


def test_deaths_with_one_item_alone_are_counted(tmp_path: Path) -> None:
    for _ in range(3):
        dies_with_a_claim(tmp_path, 1, total=1)
    assert worker(tmp_path, 1).claim(1) == Claim([0], alone=3)


def test_the_lock_of_a_killed_worker_is_free_though_its_child_lives(tmp_path: Path) -> None:
    def parent() -> None:
        lock = LifeLock(tmp_path / "life")
        child = fork(time.sleep, 60)
        (tmp_path / "child").write_text(str(child))
        time.sleep(60)
        lock.close()

    pid = fork(parent)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    with pytest.raises(BlockingIOError):
        LifeLock(tmp_path / "life")
    kill(pid)
    deadline = time.monotonic() + 60
    while True:
        try:
            LifeLock(tmp_path / "life").close()
            break
        except BlockingIOError:  # the child may not have had a turn yet, in which it lets go
            assert time.monotonic() < deadline
            time.sleep(0.01)
    os.kill(int((tmp_path / "child").read_text()), 9)


@pytest.mark.parametrize("of", [lambda claims: claims, ClaimLog.beside])
def test_a_worker_of_a_map_whose_folder_is_that_of_another_one_leaves_it_alone(tmp_path: Path, of: Any) -> None:
    folder = tmp_path / "a.jsonl.parts"
    folder.mkdir()
    late = of(worker(folder))
    late.refresh()
    all_of(worker(folder, 100))
    late.refresh()
    shutil.rmtree(folder)
    folder.mkdir()
    worker(folder).claim(4)
    before = (folder / "claims").read_bytes()
    for use in (lambda: late.claim(1), lambda: late.stop([]), lambda: late.add_block(0, 1, "")):
        with pytest.raises(FileNotFoundError):
            use()
    assert (folder / "claims").read_bytes() == before


def test_a_torn_line_is_cut(tmp_path: Path) -> None:
    one = worker(tmp_path)
    one.claim(4)
    with open(tmp_path / "claims", "ab") as file:
        file.write(b'12345678 ["claim","gone",4,')
    two = worker(tmp_path)
    assert two.claim(3) == Claim(range(4, 7))
    assert one.claim(9) == Claim(range(7, 10))
    assert worker(tmp_path).claim(1) == Claim()


def test_items_that_are_asked_again_come_once_for_each_call(tmp_path: Path) -> None:
    one = worker(tmp_path)
    all_of(one)
    for _ in range(2):
        one.ask_again([3, 7], "call", new_round=True)
    assert all_of(one) == [3, 7]
    assert one.round == 1
    assert one.is_complete


def test_blocks_of_a_stream_are_claimed_whole_once_they_are_drawn(tmp_path: Path) -> None:
    claims = worker(tmp_path, None)
    assert claims.claim(5) == Claim()
    claims.add_block(0, 3, "checksum")
    claims.add_block(0, 2, "of another drawer, who was too late")
    claims.add_block(3, 4, "checksum")
    assert claims.claim(100) == Claim(range(3))
    assert claims.claim(1) == Claim(range(3, 4))
    assert claims.claim(1) == Claim()
    claims.end_stream(4)
    assert claims.claim(1) is None


def test_many_processes_claim_each_item_once(tmp_path: Path) -> None:
    def claim_all(number: int) -> None:
        (tmp_path / f"found-{number}").write_text(" ".join(map(str, all_of(worker(tmp_path, 500), most=7))))

    assert [ended(pid) for pid in [fork(claim_all, number) for number in range(4)]] == [0] * 4
    found = [int(item) for number in range(4) for item in (tmp_path / f"found-{number}").read_text().split()]
    assert sorted(found) == list(range(500))


def of_call(folder: Path, call: str) -> ClaimLog:
    claims = ClaimLog(folder, 10, call=call)
    claims.enter()
    return claims


def test_a_stop_ends_all_workers_of_its_call_and_no_other(tmp_path: Path) -> None:
    one, two, other = of_call(tmp_path, "a"), of_call(tmp_path, "a"), of_call(tmp_path, "b")
    one.claim(2)
    two.claim(2)
    assert one.stop([1])
    assert two.claim(2) is None
    assert two.is_stopped
    assert not other.is_stopped
    assert sorted(all_of(other)) == [1, 4, 5, 6, 7, 8, 9]


def test_a_map_that_is_complete_cannot_be_stopped(tmp_path: Path) -> None:
    one, two = of_call(tmp_path, "a"), of_call(tmp_path, "a")
    one.claim(10)
    assert one.claim(10) is None
    assert not two.stop([])
    assert not two.is_stopped


def test_a_worker_that_has_answered_the_last_items_does_not_stop(tmp_path: Path) -> None:
    claims = of_call(tmp_path, "a")
    claims.claim(10)
    assert not claims.stop([])
    assert claims.claim(10) is None


def test_an_item_that_was_left_at_stops_has_killed_nobody(tmp_path: Path) -> None:
    for call in "abcd":
        claims = of_call(tmp_path, call)
        assert list(claims.claim(1).indices) == [0]  # type: ignore[union-attr]
        assert claims.stop([0])
        claims.leave()
    assert of_call(tmp_path, "e").claim(1) == Claim([0])


def test_finished_items_are_those_of_closed_claims_of_everyone(tmp_path: Path) -> None:
    dies_with_a_claim(tmp_path, 4, answers=3)
    one, two = worker(tmp_path), worker(tmp_path)
    assert one.claim(2) == Claim([3])
    assert two.claim(2) == Claim(range(4, 6))
    assert (one.finished, two.finished) == (3, 3)
    two.claim(2)
    one.claim(2)
    assert one.finished == 6
    one.ask_again([0, 1], "again", new_round=True)
    assert one.finished == 4
