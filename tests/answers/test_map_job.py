"""A map and its files: what goes on, what is refused, and what is left at each moment of the end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbaccel.answers import Answers, Failed, MapJob
from nbaccel.answers.claim_log import ClaimLog
from nbaccel.answers.map_job import as_items
from nbaccel.answers.records import AnswerRecord
from nbaccel.answers.source_mark import SourceMark
from nbaccel.errors import CannotContinue
from old_maps import program

ITEMS = ["one", "three", "four"]


def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


def whisper(texts: list[str]) -> list[str]:
    return [text.lower() for text in texts]


def opened(out: Path | None, items: Any = ITEMS, function: Any = shout, **options: Any) -> MapJob:
    return MapJob.open(items, function, options.pop("setup", None), out=out, **options)


def answer(job: MapJob, only: int = 100, failing: tuple[int, ...] = ()) -> None:
    """Answer up to `only` items, as one worker does."""
    claims = job.claims()
    file = job.record_file(claims.enter())
    while only and (claim := claims.claim(1)) is not None and claim.indices:
        (item,) = claim.indices
        if item in failing:
            packed = job.format.pack_error(item, "ValueError: no")
            file.append([AnswerRecord(item, packed, is_failed=True, round=claims.round)])
        else:
            file.append([AnswerRecord(item, job.format.pack(item, ITEMS[item].upper()), round=claims.round)])
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
    monkeypatch.setitem(globals(), "HELD", [])  # data
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
    return Path(shutil.copytree(Path(__file__).parents[1] / "old_maps", tmp_path / "old"))


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


def test_overwrite_starts_anew(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    job = opened(tmp_path / "a.jsonl", function=whisper, overwrite=True)
    assert not job.is_finished
    answer(job, only=1)
    job.close()
    job = opened(tmp_path / "a.jsonl", overwrite=True)
    assert job.records().done == 0
    job.close()


def test_what_another_run_writes_is_not_overwritten(tmp_path: Path) -> None:
    running = opened(tmp_path / "a.jsonl")
    with pytest.raises(CannotContinue, match=r"a.jsonl is being written by another run"):
        opened(tmp_path / "a.jsonl", overwrite=True)
    running.close()
    opened(tmp_path / "a.jsonl", overwrite=True).close()


def test_of_the_ranks_of_one_call_the_first_overwrites(tmp_path: Path) -> None:
    finished(tmp_path / "a.jsonl")
    first = opened(tmp_path / "a.jsonl", overwrite=True, token="call")
    answer(first, only=2)
    second = opened(tmp_path / "a.jsonl", overwrite=True, token="call")
    assert second.records().done == 2
    first.close()
    second.close()


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
    assert not (tmp_path / "a.jsonl.parts").exists() or opened(tmp_path / "a.jsonl").is_finished


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
