"""A map and its files: what goes on, what is refused, and what is left at each moment of the end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from features.map.forks import ended, fork
from nbaccel.errors import CannotContinue, CannotSave
from nbaccel.features.map import Answers, Failed, MapJob
from nbaccel.features.map.claim_log import ClaimLog
from nbaccel.features.map.map_job import as_items
from nbaccel.features.map.records import AnswerRecord
from nbaccel.features.source.fingerprint import checksum_of
from nbaccel.features.source.source_mark import SourceMark
from old_maps import program

ITEMS = ["one", "three", "four"]


def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


def whisper(texts: list[str]) -> list[str]:
    return [text.lower() for text in texts]


def opened(out: Path | None, items: Any = ITEMS, function: Any = shout, **options: Any) -> MapJob:
    return MapJob.open(items, function, options.pop("setup", None), out=out, **options)


def killed_with_a_claim(job: MapJob) -> None:
    """Claim an item in a process that is killed then."""

    def process() -> None:
        claims = job.claims()
        claims.enter()
        claims.claim(1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(process)) != 0


def answer(job: MapJob, only: int = 100, failing: tuple[int, ...] = ()) -> None:
    """Answer up to `only` items, as one worker does."""
    claims = job.claims()
    file = job.record_file(claims.enter())
    while only and (claim := claims.claim(1)) is not None and claim.indices:
        for item in claim.indices:
            is_failed = item in failing
            text = ITEMS[item].upper()
            packed = job.format.pack_error(item, "ValueError: no") if is_failed else job.format.pack(item, text)
            file.append([AnswerRecord(item, packed, is_failed=is_failed, round=claims.round)])
        job.note_answers()
        only -= 1
    file.close()
    claims.leave()


def finished(out: Path | None, **options: Any) -> Answers:
    job = opened(out, **options)
    if not job.finish():
        answer(job)
    assert job.finish()
    job.close()
    return job.answers()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_answers_are_in_the_order_of_the_items_and_nothing_but_two_files_stays(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    assert finished(out) == ["ONE", "THREE", "FOUR"]
    assert left(tmp_path) == ["a.jsonl", "a.jsonl.manifest.json"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"index": 0, "answer": "ONE"},
        {"index": 1, "answer": "THREE"},
        {"index": 2, "answer": "FOUR"},
    ]


def test_the_same_call_finds_its_answers(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    again = opened(tmp_path / "a.jsonl")
    assert again.is_finished
    assert again.answers()[-1] == "FOUR"
    assert left(tmp_path) == ["a.jsonl", "a.jsonl.manifest.json"]


def test_a_folder_that_was_copied_goes_on(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    first = opened(tmp_path / "here" / "a.jsonl")
    answer(first, only=2)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    job = opened(tmp_path / "there" / "a.jsonl")
    assert job.records().done == 2
    assert finished(tmp_path / "there" / "a.jsonl") == ["ONE", "THREE", "FOUR"]
    first.close()


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "more items": ({"items": [*ITEMS, "five"]}, r"to other items \(3 items, now 4 items\)"),
    "other items": ({"items": ["one", "three", "six"]}, "as many, 3 items, with other contents or order"),
    "another order": ({"items": ITEMS[::-1]}, "with other contents or order"),
    "another function": ({"function": whisper}, "of another function"),
    "another setup": ({"setup": whisper}, "with another setup"),
    "another key": ({"key": "weights 2"}, "with key=None, now key='weights 2'"),
    "a stream": ({"items": iter(ITEMS)}, "3 items, now a stream"),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("is_over", [True, False])
def test_what_belongs_to_something_else_is_refused_with_both_ways_out(tmp_path: Path, case: str, is_over: bool) -> None:
    options, words = DIFFERENT[case]
    if is_over:
        finished(tmp_path / "a.jsonl")
    else:
        job = opened(tmp_path / "a.jsonl")
        answer(job, only=1)
        job.close()
    before = left(tmp_path)
    if "items" in options and not isinstance(options["items"], list):
        options = {"items": iter(ITEMS)}
    with pytest.raises(CannotContinue, match=f"has answers .*{words}.*overwrite=True .*another name") as caught:
        opened(tmp_path / "a.jsonl", **options)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == before


def test_answers_in_memory_of_killed_ranks_are_removed_by_a_later_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = {}
    for name in ("killed", "alive", "young"):
        old[name] = tmp_path / f"nbaccel-map-{name}"
        old[name].mkdir()
        (old[name] / "workers").mkdir()
    (old["killed"] / "workers" / "open-1").touch()
    alive = ClaimLog(old["alive"], 3).attend()
    (tmp_path / "nbaccel-map-link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    for path in (old["killed"], old["alive"], tmp_path / "elsewhere"):
        os.utime(path, (1, 1))
    opened(None).close()
    assert left(tmp_path) == ["elsewhere", "nbaccel-map-alive", "nbaccel-map-link", "nbaccel-map-young"]
    alive.close()


LIMIT, HELD = 4, [1] * 999


def shorten(text: str) -> str:
    return text[:LIMIT]


def shortened(texts: list[str]) -> list[str]:
    return [shorten(text) for text in texts if HELD]


def make(limit: int) -> Any:
    return lambda texts: [text[:limit] for text in texts]


def test_a_changed_constant_or_helper_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "a.jsonl", function=shortened)
    monkeypatch.setitem(globals(), "HELD", [2] * 999)  # data
    assert opened(tmp_path / "a.jsonl", function=shortened).is_finished
    monkeypatch.setitem(globals(), "LIMIT", 5)
    with pytest.raises(
        CannotContinue, match="of other code: LIMIT was 4 then, and is 5 now; put back, the same line goes on: over"
    ):
        opened(tmp_path / "a.jsonl", function=shortened)
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "shorten", lambda text: text)
    with pytest.raises(
        CannotContinue,
        match=r"has answers of other code: shorten\(\) has changed; put back, the same line goes on: overwrite=True",
    ):
        opened(tmp_path / "a.jsonl", function=shortened)


def test_a_changed_closure_of_setup_is_refused_by_name(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl", setup=make(1))
    with pytest.raises(CannotContinue, match="of other code: limit in lambda was 1 then, and is 2 now"):
        opened(tmp_path / "a.jsonl", setup=make(2))


def test_of_the_ranks_of_one_call_the_first_one_says_what_the_source_is(tmp_path: Path) -> None:
    """A rank may read its own number, or another value that the others have otherwise."""
    marks = SourceMark.of(make(0)), SourceMark.of(None)
    first = opened(tmp_path / "a.jsonl", function=make(0), token="call", marks=marks)
    second = opened(tmp_path / "a.jsonl", function=make(1), token="call", marks=marks)
    first.close()
    second.close()


@pytest.fixture
def old_maps(tmp_path: Path) -> Path:
    """The files that the version before wrote, whose functions are in `program.py` beside them."""
    return Path(shutil.copytree(Path(__file__).parents[2] / "old_maps", tmp_path / "old"))


def test_what_the_version_before_wrote_goes_on(old_maps: Path) -> None:
    assert json.loads((old_maps / "finished.jsonl.manifest.json").read_text())["version"] == 1
    whole = MapJob.open(program.ITEMS, program.whisper, None, out=old_maps / "finished.jsonl")
    assert whole.answers() == program.ITEMS
    job = MapJob.open(program.ITEMS, program.shout, program.load, out=old_maps / "unfinished.jsonl", key="v1")
    assert job.records().done == 2
    answer(job)
    assert job.finish()
    assert job.answers() == ["ONE", "THREE!", "FOUR!"]  # the first is of the version after
    known = json.loads((old_maps / "unfinished.jsonl.manifest.json").read_text())
    assert (known["version"], known["setup"].keys()) == (2, {""})
    job.close()


@pytest.mark.parametrize(
    ("out", "words"), [("finished.jsonl", "another function"), ("unfinished.jsonl", "another setup")]
)
def test_another_function_is_refused_by_what_the_version_before_wrote(old_maps: Path, out: str, words: str) -> None:
    function, setup = (program.shout, shout) if out == "unfinished.jsonl" else (shout, None)
    with pytest.raises(CannotContinue, match=rf"has answers \w+ {words} \(its source has changed\)"):
        MapJob.open(program.ITEMS, function, setup, out=old_maps / out, key="v1")


def test_overwrite_drops_what_belongs_to_something_else(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    job = opened(tmp_path / "a.jsonl", function=whisper, overwrite=True)
    assert not job.is_finished
    answer(job, only=1)
    job.close()
    job = opened(tmp_path / "a.jsonl", items=ITEMS[::-1], overwrite=True)
    assert job.records().done == 0
    job.close()


def test_overwrite_that_stays_in_the_line_drops_nothing_of_that_line(tmp_path: Path) -> None:
    job = opened(tmp_path / "a.jsonl", overwrite=True)
    answer(job, only=2)
    job.close()
    job = opened(tmp_path / "a.jsonl", overwrite=True)
    assert job.records().done == 2
    answer(job)
    assert job.finish()
    job.close()
    assert opened(tmp_path / "a.jsonl", overwrite=True).is_finished


@pytest.mark.parametrize("damage", ["foreign", "changed", "damaged", "of another version"])
def test_overwrite_drops_what_comes_from_elsewhere(tmp_path: Path, damage: str) -> None:
    out, manifest = tmp_path / "a.jsonl", tmp_path / "a.jsonl.manifest.json"
    finished(out)
    if damage == "foreign":
        manifest.unlink()
    elif damage == "changed":
        out.write_text("mine")
    else:
        manifest.write_text("[]" if damage == "damaged" else '{"version": 99}')
    before = out.read_text()
    with pytest.raises(CannotContinue, match="overwrite=True"):
        opened(out)
    job = opened(out, overwrite=True)
    assert (job.is_finished, out.read_text()) == (False, before)
    job.close()
    assert finished(out, overwrite=True) == ["ONE", "THREE", "FOUR"]
    assert left(tmp_path) == ["a.jsonl", "a.jsonl.manifest.json"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_what_is_overwritten_stays_until_new_answers_replace_it(tmp_path: Path, name: str) -> None:
    finished(tmp_path / name)
    job = opened(tmp_path / name, function=whisper, overwrite=True)
    assert job.format.read(tmp_path / name) == ["ONE", "THREE", "FOUR"]
    job.close()
    job.discard()  # as after a function that fails at once
    assert left(tmp_path) == [name, f"{name}.manifest.json"]
    job = opened(tmp_path / name, function=whisper, overwrite=True)
    answer(job, only=1)
    job.close()
    before = opened(tmp_path / name)
    assert before.is_finished
    assert before.answers() == ["ONE", "THREE", "FOUR"]
    job = opened(tmp_path / name, function=whisper)
    assert job.records().done == 1, "the new call goes on, and need not say overwrite again"
    answer(job)
    assert job.finish()
    job.close()
    assert left(tmp_path) == [name, f"{name}.manifest.json"]
    with pytest.raises(CannotContinue, match="of another function"):
        opened(tmp_path / name)


def test_a_map_whose_folder_is_discarded_has_not_the_answers_of_another(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    job = opened(tmp_path / "a.jsonl", function=whisper, overwrite=True)
    job.close()
    job.discard()
    assert not job.is_finished


def test_what_another_run_writes_is_not_overwritten(tmp_path: Path) -> None:
    running = opened(tmp_path / "a.jsonl")
    with pytest.raises(CannotContinue, match=r"a.jsonl is being written by another run"):
        opened(tmp_path / "a.jsonl", function=whisper, overwrite=True)
    opened(tmp_path / "a.jsonl", overwrite=True).close()  # the same call joins in
    running.close()
    opened(tmp_path / "a.jsonl", function=whisper, overwrite=True).close()


def test_of_the_ranks_of_one_call_the_first_overwrites(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl", function=whisper)
    first = opened(tmp_path / "a.jsonl", overwrite=True, token="call")
    answer(first, only=2)
    second = opened(tmp_path / "a.jsonl", overwrite=True, token="call")
    assert second.records().done == 2
    first.close()
    second.close()


def test_records_of_a_process_that_was_killed_before_it_began_are_dropped(tmp_path: Path) -> None:
    job = opened(tmp_path / "a.jsonl")
    answer(job, only=2)
    job.close()
    (job.folder / "manifest.json").unlink()
    job = opened(tmp_path / "a.jsonl", function=whisper)
    assert job.records().done == 0
    job.close()


def test_many_processes_may_open_a_map_at_once(tmp_path: Path) -> None:
    def open_all(_number: int) -> None:
        for number in range(20):
            opened(tmp_path / f"{number}.jsonl", token="call").close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_all, range(4)))
    assert len(left(tmp_path)) == 20


@pytest.mark.parametrize("is_over", [True, False])
def test_ranks_of_one_call_that_pass_something_else_are_said(tmp_path: Path, is_over: bool) -> None:
    job = opened(tmp_path / "a.jsonl", token="call")
    answer(job)
    assert not is_over or job.finish()
    for overwrite in (False, True):
        with pytest.raises(CannotContinue, match=r"the ranks of this call do not pass the same: .* with key=None, now"):
            opened(tmp_path / "a.jsonl", key=1, token="call", overwrite=overwrite)
    job.close()


def streamed(out: Path, items: Any, **options: Any) -> MapJob:
    """Open a map of a stream, and answer all items of a new one, in blocks of two."""
    job = opened(out, as_items(items), **options)
    if not job.is_finished:
        claims, listed = job.claims(), list(items if isinstance(items, list | Again) else ITEMS)
        for start in range(0, len(listed), 2):
            block = listed[start : start + 2]
            claims.add_block(start, start + len(block), checksum_of(block))
        claims.end_stream(len(listed))
        answer(job)
        assert job.finish()
    job.close()
    return job


class Again:
    """A stream that can be read several times."""

    def __init__(self, items: list[str]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


OTHER_STREAMS = {
    "items 0 to 1 are others": ["one", "two", "four"],
    "item 2 is another one": ["one", "three", "five"],
    "it ends after 2 now": ["one", "three"],
    "more than 3 now": [*ITEMS, "five"],
    "it ends after 0 now": [],
}


@pytest.mark.parametrize("words", OTHER_STREAMS)
@pytest.mark.parametrize("make", [iter, Again])
def test_a_finished_stream_is_compared_item_by_item(tmp_path: Path, words: str, make: Any) -> None:
    out = tmp_path / "a.jsonl"
    streamed(out, make(ITEMS))
    assert opened(out, as_items(make(ITEMS))).answers() == ["ONE", "THREE", "FOUR"]
    with pytest.raises(
        CannotContinue, match=rf"a.jsonl has answers to other items \({words}\): overwrite=True"
    ) as caught:
        opened(out, as_items(make(OTHER_STREAMS[words])))
    assert str(caught.value).endswith("make it anew") == (make is iter)
    assert "\n" not in str(caught.value)
    stream = as_items(make(OTHER_STREAMS[words]))
    job = opened(out, stream, overwrite=True)
    assert (job.is_finished, list(stream)) == (False, OTHER_STREAMS[words]), "nothing that was compared is lost"
    job.close()


def test_failed_items_of_a_finished_stream_are_asked_again_with_the_same_items(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    job = opened(out, as_items(Again(ITEMS)))
    claims = job.claims()
    claims.add_block(0, 3, checksum_of(ITEMS))
    claims.end_stream(3)
    answer(job, failing=(1,))
    assert job.finish()
    job.close()
    again = opened(out, as_items(Again(ITEMS)), retry_failed=True)
    assert again.claims().blocks == {}
    claims = again.claims()
    claims.refresh()
    assert claims.blocks == {0: (3, checksum_of(ITEMS))}
    with pytest.raises(CannotContinue, match="gives more items now than the 3 of before"):
        claims.add_block(3, 4, "")
    answer(again)
    assert again.finish()
    again.close()
    with pytest.raises(CannotContinue, match="to other items"):
        opened(out, as_items(Again(ITEMS[::-1])))


def test_a_finished_map_is_read_where_nobody_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "a.jsonl")

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    exists = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, *rest: exists(path, *rest) if path == tmp_path else refuse())
    assert opened(tmp_path / "a.jsonl").answers() == ["ONE", "THREE", "FOUR"]
    assert opened(tmp_path / "a.jsonl", overwrite=True).is_finished
    with pytest.raises(CannotSave, match=r"b.jsonl.parts cannot be written \(Read-only file system\): mend that, or"):
        opened(tmp_path / "b.jsonl")


def test_a_place_where_no_folder_can_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotSave, match=r"/proc/x.jsonl.parts cannot be written \(No such file or directory\)"):
        opened(Path("/proc/x.jsonl"))
    (tmp_path / "file").touch()
    with pytest.raises(CannotSave, match=r"/file cannot be written \(File exists\)"):
        opened(tmp_path / "file" / "x.jsonl")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CannotSave, match=r'out="x.jsonl" is in the working folder, which is gone: name the file'):
        opened(Path("x.jsonl"))


def test_a_disk_that_loses_answers_each_time_ends_the_map(tmp_path: Path) -> None:
    job = opened(tmp_path / "a.jsonl")
    with pytest.raises(
        CannotSave, match=r"a.jsonl.parts has lost answers .*, 4 times, now those to 3 items: is its disk"
    ):
        for _ in range(9):
            answer(job)
            for path in (job.folder / "records").iterdir():
                os.truncate(path, 0)
            job.finish()
    job.close()


@pytest.mark.parametrize("key", [{1, 2}, object(), torch.ones(2), b"v1", ["v1", print], {("a", "b"): print}])
def test_a_key_is_plain(key: Any) -> None:
    with pytest.raises(TypeError, match=r'^key is a text, a number, None, or .* got a \w+: .*key="checkpoint 3"$'):
        opened(None, key=key)


def test_equal_keys_are_equal(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl", key={"b": numpy.float64(0.5), "a": (1, numpy.int64(2))})
    assert opened(tmp_path / "a.jsonl", key={"a": (1, 2), "b": 0.5}).is_finished


def test_a_rank_that_comes_when_all_is_done_overwrites_nothing(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    assert finished(tmp_path / "a.jsonl", overwrite=True, token="call") == ["ONE", "THREE", "FOUR"]
    late = opened(tmp_path / "a.jsonl", overwrite=True, token="call")
    assert late.is_finished
    assert left(tmp_path) == ["a.jsonl", "a.jsonl.manifest.json"]


def test_a_function_that_answered_nothing_may_be_mended(tmp_path: Path) -> None:
    job = opened(tmp_path / "a.jsonl", function=whisper)
    answer(job, only=0)
    job.close()
    assert finished(tmp_path / "a.jsonl") == ["ONE", "THREE", "FOUR"]


def test_a_foreign_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(CannotContinue, match=r"a.jsonl exists, and nbaccel.map did not write it"):
        opened(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_is_kept(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "a.jsonl.parts").mkdir()
    (tmp_path / "a.jsonl.parts" / "mine").touch()
    with pytest.raises(CannotContinue, match=r"a.jsonl.parts has files, and nbaccel.map did not write them: .*, or "):
        opened(tmp_path / "a.jsonl", overwrite=overwrite)
    assert left(tmp_path / "a.jsonl.parts") == ["mine"]


def test_a_file_that_was_changed_is_not_taken_for_the_answers(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("more\n")
    with pytest.raises(CannotContinue, match=r"was changed after it was written"):
        opened(tmp_path / "a.jsonl")


def test_a_damaged_manifest_is_said(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.manifest.json").write_text("{")
    with pytest.raises(CannotContinue, match=r"manifest.json cannot be read"):
        opened(tmp_path / "a.jsonl")


@pytest.mark.parametrize(("name", "is_over"), [("failed", True), ("bytes", True), ("key", True), ("total", False)])
def test_a_manifest_that_lacks_something_is_said(tmp_path: Path, name: str, is_over: bool) -> None:
    job = opened(tmp_path / "a.jsonl")
    answer(job, only=9 if is_over else 1)
    assert job.finish() is is_over
    job.close()
    path = tmp_path / ("a.jsonl.manifest.json" if is_over else "a.jsonl.parts/manifest.json")
    known = json.loads(path.read_text())
    del known[name]
    path.write_text(json.dumps(known))
    with pytest.raises(CannotContinue, match=f'manifest.json is damaged, it has no "{name}": overwrite=True'):
        opened(tmp_path / "a.jsonl")
    assert finished(tmp_path / "a.jsonl", overwrite=True) == ["ONE", "THREE", "FOUR"]


@pytest.mark.parametrize("is_over", [True, False])
def test_failed_items_are_left_alone_unless_they_are_asked_for(tmp_path: Path, is_over: bool) -> None:
    out = tmp_path / "a.jsonl"
    job = opened(out)
    answer(job, failing=(1,))
    if is_over:
        assert job.finish()
        assert job.answers().failed == [Failed(1, "ValueError: no")]
        assert opened(out).is_finished
    job.close()
    assert finished(out, retry_failed=True) == ["ONE", "THREE", "FOUR"]
    assert left(tmp_path) == ["a.jsonl", "a.jsonl.manifest.json"]


@pytest.mark.parametrize("is_joined", [True, False])
def test_failed_and_missing_items_can_be_done_by_a_mended_function_and_the_other_answers_stay(
    is_joined: bool, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    job = opened(out)
    answer(job, only=100 if is_joined else 2, failing=(0,))
    assert job.finish() is is_joined
    job.close()
    with pytest.raises(CannotContinue, match=r"of another function.*: retry_failed=True keeps them and does the rest"):
        opened(out, function=whisper)
    with pytest.raises(CannotContinue, match=r"to other items .*: overwrite=True"):
        opened(out, ITEMS[::-1], function=whisper, retry_failed=True)
    job = opened(out, function=whisper, retry_failed=True)
    assert job.news.startswith("answers of another function")
    answer(job)
    assert job.finish()
    job.close()
    assert job.answers() == ["ONE", "THREE", "FOUR"]
    assert opened(out, function=whisper).is_finished, "they are answers by this function now"
    with pytest.raises(CannotContinue, match=r"of another function .*: overwrite=True"):
        opened(out, retry_failed=True)  # nothing is left to do by another one


def test_a_mended_function_waits_for_the_end_of_a_run_with_the_earlier_one(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    running = opened(out)
    answer(running, only=2, failing=(0, 1))
    before = (running.folder / "manifest.json").read_text(), (running.folder / "claims").read_text()
    with pytest.raises(CannotContinue, match=r"a.jsonl is being written by a run with the earlier code: stop that"):
        opened(out, function=whisper, retry_failed=True)
    assert ((running.folder / "manifest.json").read_text(), (running.folder / "claims").read_text()) == before
    running.close()
    first = opened(out, function=whisper, retry_failed=True, token="call")
    opened(out, function=whisper, retry_failed=True, token="call").close()  # the ranks of one call
    first.close()


@pytest.mark.parametrize("is_watched", [True, False])
def test_an_item_is_not_to_blame_for_the_end_of_a_run_as_a_whole_whose_ranks_would_be_started_again(
    tmp_path: Path, is_watched: bool
) -> None:
    for _ in range(3):
        job = opened(tmp_path / "a.jsonl", ITEMS[:1], is_watched=is_watched)
        killed_with_a_claim(job)
        job.close()  # as at the death of the notebook
    job = opened(tmp_path / "a.jsonl", ITEMS[:1], is_watched=is_watched)
    claims = job.claims()
    claims.enter()
    claim = claims.claim(1)
    assert claim is not None
    assert claim.alone == (0 if is_watched else 3)
    claims.leave()
    job.close()


def test_an_item_that_fails_again_has_its_newest_error(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    job = opened(out)
    answer(job, failing=(1,))
    job.finish()
    job.close()
    job = opened(out, retry_failed=True)
    answer(job, failing=(1,))
    assert job.finish()
    job.close()
    assert job.answers() == ["ONE", Failed(1, "ValueError: no"), "FOUR"]


def test_records_that_a_disk_has_lost_are_asked_again(tmp_path: Path) -> None:
    job = opened(tmp_path / "a.jsonl")
    answer(job)
    for path in (job.folder / "records").iterdir():
        os.truncate(path, 40)
    assert not job.finish()
    answer(job)
    assert job.finish()
    assert job.answers() == ["ONE", "THREE", "FOUR"]
    job.close()


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(8))
def test_a_kill_at_any_moment_of_the_end_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    job = opened(tmp_path / "a.jsonl")
    answer(job)
    calls = 0

    def killed_at(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise _Killed
            return function(*args, **kwargs)

        return call

    for owner, name in [(os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]:
        monkeypatch.setattr(owner, name, killed_at(getattr(owner, name)))
    try:
        job.finish()
    except _Killed:
        pass
    finally:
        monkeypatch.undo()
        job.close()
    assert finished(tmp_path / "a.jsonl") == ["ONE", "THREE", "FOUR"]
    assert left(tmp_path) == ["a.jsonl", "a.jsonl.manifest.json"]


def test_a_folder_in_which_somebody_works_is_not_taken_for_the_rest_of_joined_answers(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    folder = tmp_path / "a.jsonl.parts"
    folder.mkdir()
    (folder / "job.lock").touch()
    alive = ClaimLog(folder, 3).attend()
    assert opened(tmp_path / "a.jsonl").is_finished
    assert folder.exists()
    alive.close()
    assert opened(tmp_path / "a.jsonl").is_finished
    assert not folder.exists()


def test_answers_in_memory_leave_no_folder() -> None:
    job = opened(None)
    answer(job)
    assert job.finish()
    answers = job.answers()
    job.close()
    assert answers == ["ONE", "THREE", "FOUR"]
    assert not job.folder.exists()


def test_no_item_is_no_trouble(tmp_path: Path) -> None:
    assert finished(tmp_path / "a.jsonl", items=[]) == []


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ("text", r"write \[item\]"),
        ({"a": 1}, "list\\(items.items\\(\\)\\)"),
        ({"a", "b"}, "sorted\\(items\\)"),
        (7, "a list of items, or a stream of them, got a int"),
    ],
)
def test_what_is_no_list_of_items_is_said(items: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        as_items(items)


def test_values_of_a_dict_are_items() -> None:
    assert as_items({"a": 1, "b": 2}.values()) == [1, 2]


@pytest.mark.parametrize("options", [{"tries": 0}, {"batch_size": 0}, {"batch_size": 1.5}])
def test_numbers_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number from 1"):
        opened(None, **options)


def test_a_name_that_chooses_no_format_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'"answers.jsonl" or "answers.parquet"; got .*answers.csv'):
        opened(tmp_path / "answers.csv")
    assert left(tmp_path) == []
