"""Output of ranks: every line whole, in order, tagged when that says something, and never too fast for a notebook."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nbaccel.output.router import KEPT_BYTES, OutputRouter
from nbaccel.output.screens import ConsoleScreen


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class RecordingScreen:
    """Remembers writes and rich messages, in order, and every state of the bars where it has room for them."""

    def __init__(self, has_room_for_bars: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.has_room_for_bars = has_room_for_bars
        self.bars: list[list[str]] = [[]]

    def show_bars(self, rows: Sequence[str]) -> None:
        assert self.has_room_for_bars
        self.bars.append(list(rows))

    def write(self, stream: str, text: str) -> None:
        self.calls.append((stream, text))

    def publish(self, message: dict[str, Any]) -> None:
        self.calls.append(("rich", message))

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [(stream, text) for stream, text in self.calls if stream != "rich"]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.writes)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def rich(self) -> list[dict[str, Any]]:
        return [message for kind, message in self.calls if kind == "rich"]

    @property
    def visible(self) -> list[str]:
        """What a person sees in the end: carriage returns overwrite, streams share one terminal."""
        rows = []
        for raw in self.text.split("\n"):
            row = ""
            for piece in raw.split("\r"):
                row = piece + row[len(piece) :]
            rows.append(row.rstrip())
        return rows


class Run:
    """A router with a clock of its own."""

    def __init__(self, world_size: int, has_room_for_bars: bool = False, **options: Any) -> None:
        self.clock, self.screen = Clock(), RecordingScreen(has_room_for_bars)
        self.router = OutputRouter(world_size, self.screen, clock=self.clock, **options)

    def feed(self, rank: int, text: str, stream: str = "stdout") -> None:
        self.router.feed(rank, stream, text.encode())

    def wait(self, seconds: float) -> None:
        """Let time pass as the kernel's loop does: sleep until something is due."""
        end = self.clock.now + seconds
        idle = 0
        while (due_in := self.router.due_in()) is not None and self.clock.now + due_in <= end:
            idle = 0 if due_in else idle + 1
            assert idle < 5, "tick has nothing to do, but due_in says it has"
            self.clock.now += due_in
            self.router.tick()
        self.clock.now = end

    def end(self) -> list[str]:
        self.router.close()
        return self.screen.lines


# Lines --------------------------------------------------------------------------------------------------------------


def test_one_rank_alone_is_not_tagged() -> None:
    run = Run(1)
    run.feed(0, "    indented\n\n{}\nlast without newline")
    assert run.end() == ["    indented", "", "{}", "last without newline"]


def test_a_run_where_only_one_rank_prints_is_not_tagged() -> None:
    run = Run(2)
    run.feed(1, "only me\n")
    run.wait(2)
    assert run.screen.text == "only me\n"


def test_what_gloo_prints_of_its_connections_is_in_the_log_alone() -> None:
    log = io.BytesIO()
    run = Run(2, log=log)
    for rank in range(2):
        said = f"[Gloo] Rank {rank} is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
        run.feed(rank, said)
    run.feed(1, "loss 0.5\n")
    assert run.end() == ["loss 0.5"]
    assert log.getvalue().count(b"is connected to 1 peer ranks") == 2


def test_a_message_of_torch_that_all_ranks_print_is_one_line_without_its_stamp() -> None:
    log = io.BytesIO()
    run = Run(2, log=log)
    said = "reducer.cpp:1457] Warning: find_unused_parameters=True was specified (function operator())"
    for rank in (0, 1):
        run.feed(rank, f"[rank{rank}]:[W1122 05:43:1{rank}.12345678{rank} {said}\n\n", "stderr")
    assert run.end() == [f"[W {said}", ""]
    assert f"[rank 1] [rank1]:[W1122 05:43:11.123456781 {said}" in log.getvalue().decode()


def test_a_notice_of_ours_is_not_tagged_and_does_not_part_equal_lines() -> None:
    run = Run(2)
    run.feed(1, "begin\nepoch 0\n")
    run.feed(0, "begin\nnbaccel: each of 8 batches split over 2 ranks\nepoch 0\n")
    run.feed(0, "nbaccel: divide by counts\n")
    run.wait(0.1)
    assert run.screen.lines == [
        "begin",
        "nbaccel: each of 8 batches split over 2 ranks",
        "epoch 0",
        "nbaccel: divide by counts",
    ]


def test_a_notice_that_waits_behind_a_line_of_another_stream_does_not_part_equal_lines() -> None:
    run = Run(2)
    run.feed(0, "warned\n", "stderr")
    run.feed(0, "nbaccel: each of 8 batches split over 2 ranks\nepoch 0\n")
    run.feed(1, "epoch 0\n")
    run.wait(0.1)
    run.feed(1, "warned\n", "stderr")
    assert sorted(run.end()) == ["epoch 0", "nbaccel: each of 8 batches split over 2 ranks", "warned"]


def test_lines_of_all_ranks_are_tagged_from_the_first_line_on_that_was_not() -> None:
    run = Run(2)
    for rank in range(2):
        run.feed(rank, f"epoch 0\nmine is {rank}\nepoch 1\n")
    assert run.end() == ["epoch 0", "[rank 0] mine is 0", "[rank 1] mine is 1", "[all] epoch 1"]


def test_lines_are_tagged_once_two_ranks_have_printed() -> None:
    run = Run(2)
    run.feed(0, "early\n")
    run.wait(2)
    run.feed(1, "hello\n")
    run.feed(0, "later\n")
    assert run.end() == ["early", "[rank 1] hello", "[rank 0] later"]


def test_words_of_two_ranks_do_not_tear() -> None:
    run = Run(2)
    for word in ("a", " b", " c\n"):
        run.feed(0, word)
        run.feed(1, word.upper())
        run.wait(1)
    assert sorted(run.end()) == ["[rank 0] a b c", "[rank 1] A B C"]


def test_two_thousand_lines_of_two_ranks_stay_whole_ordered_and_few_writes() -> None:
    run = Run(2)
    for start in range(0, 2000, 50):
        for rank in (0, 1):
            run.feed(rank, "".join(f"a {rank} {number}\n" for number in range(start, start + 50)))
        run.clock.now += 0.005
        if run.router.due_in() == 0:
            run.router.tick()
    lines = run.end()
    for rank in (0, 1):
        expected = [f"[rank {rank}] a {rank} {number}" for number in range(2000)]
        assert [line for line in lines if f"[rank {rank}]" in line] == expected
    assert len(lines) == 4000
    assert len(run.screen.writes) <= 60


def test_stdout_and_stderr_of_a_rank_keep_their_order() -> None:
    run = Run(1)
    run.feed(0, "1\n")
    run.feed(0, "2\n", "stderr")
    run.feed(0, "3\n")
    run.router.close()
    assert run.screen.writes == [("stdout", "1\n"), ("stderr", "2\n"), ("stdout", "3\n")]


def test_text_is_written_in_batches_of_fifty_milliseconds() -> None:
    run = Run(1)
    run.feed(0, "a\n")
    run.wait(0)
    for _ in range(4):
        run.feed(0, "b\n")
        run.wait(0.01)
    assert run.screen.writes == [("stdout", "a\n")]
    assert run.router.due_in() == pytest.approx(0.01)
    run.wait(0.01)
    assert run.screen.writes == [("stdout", "a\n"), ("stdout", "b\nb\nb\nb\n")]
    assert run.router.due_in() is None


def test_text_without_newline_is_passed_on_after_a_moment_when_one_rank_is_shown() -> None:
    run = Run(1)
    run.feed(0, "downloading")
    run.wait(0.2)
    assert run.screen.text == ""
    run.wait(0.2)
    assert run.screen.text == "downloading"
    run.feed(0, " done\nnext\n")
    run.router.close()
    assert run.screen.text == "downloading done\nnext\n"


@pytest.mark.parametrize("world_size", [1, 2])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_chunking_does_not_change_the_lines(world_size: int, data: st.DataObject) -> None:
    pieces = st.sampled_from(["a", "bé", "€", "😀", "\n", "\r", "\r\n", "\x1b[31m", "\x1b[0m", "\x1b[A", " ", "\x1b[K"])
    text = "".join(data.draw(st.lists(pieces, max_size=40))).encode()
    whole, chunked = Run(world_size), Run(world_size)
    whole.router.feed(0, "stdout", text)
    position = 0
    while position < len(text):
        size = data.draw(st.integers(1, 7))
        chunked.router.feed(0, "stdout", text[position : position + size])
        position += size
    assert chunked.end() == whole.end()


@given(text=st.binary(max_size=200), size=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_decoded_alike_however_they_are_chunked(text: bytes, size: int) -> None:
    text = text.replace(b"\r", b"").replace(b"\x1b", b"")
    run = Run(1)
    for start in range(0, len(text), size):
        run.router.feed(0, "stdout", text[start : start + size])
    run.router.close()
    assert run.screen.text == (text.decode(errors="replace") + ("\n" if text and not text.endswith(b"\n") else ""))


def test_a_character_cut_by_the_moment_is_not_shown_half() -> None:
    run = Run(1)
    run.router.feed(0, "stdout", "é€".encode()[:-1])
    run.wait(1)
    assert run.screen.text == "é"
    run.router.feed(0, "stdout", "€".encode()[-1:] + b"\n")
    run.router.close()
    assert run.screen.text == "é€\n"


def test_a_very_long_line_is_cut_into_marked_pieces() -> None:
    run = Run(1)
    run.feed(0, "é" * 100_000 + "\nnext\n")
    lines = run.end()
    assert lines[-1] == "next"
    assert len(lines) == 5
    assert all(line.endswith(" [line cut here]") for line in lines[:3])
    assert all(line.startswith("[same line] ") for line in lines[1:4])
    assert sum(line.count("é") for line in lines) == 100_000
    assert max(len(line.encode()) for line in lines) <= 64 * 1024 + 20


# Identical lines ----------------------------------------------------------------------------------------------------


def test_identical_lines_of_all_ranks_become_one() -> None:
    run = Run(3)
    for rank in (2, 0, 1):
        run.feed(rank, "epoch 1\n")
        run.wait(0.3)
    assert run.screen.text == "epoch 1\n"


def test_identical_lines_more_than_a_second_apart_stay_apart() -> None:
    run = Run(2)
    run.feed(0, "epoch 1\n")
    run.wait(1.2)
    run.feed(1, "epoch 1\n")
    run.wait(1.2)
    assert run.screen.lines == ["epoch 1", "[rank 1] epoch 1"]


def test_the_same_text_on_another_stream_is_another_line() -> None:
    run = Run(2)
    run.feed(0, "x\n")
    run.feed(1, "x\n", "stderr")
    assert sorted(run.end()) == ["[rank 0] x", "[rank 1] x"]


def test_lines_that_differ_do_not_wait() -> None:
    run = Run(2)
    run.feed(0, "loss 1\n")
    run.feed(1, "loss 2\n")
    run.wait(0)
    assert run.screen.lines == ["[rank 0] loss 1", "[rank 1] loss 2"]


def test_a_line_of_one_rank_does_not_hide_that_the_next_is_of_all() -> None:
    run = Run(2)
    run.feed(0, "saving\nepoch 1\n")
    run.feed(1, "epoch 1\n")
    run.wait(0)
    assert run.screen.lines == ["[rank 0] saving", "[all] epoch 1"]


@pytest.mark.parametrize("more", [1, 3])
def test_a_rank_that_has_printed_more_holds_up_one_line_and_not_all_that_follow(more: int) -> None:
    run = Run(2)
    run.feed(1, "step 0\n")
    for number in range(more):
        run.feed(0, f"only here {number}\n")
    for number in range(6):
        run.feed(0, f"step {number}\n")
        run.feed(1, f"step {number + 1}\n")
        run.wait(0.1)
    assert run.end()[-4:-1] == ["[all] step 3", "[all] step 4", "[all] step 5"]


def test_lines_that_crossed_are_shown_oldest_first() -> None:
    run = Run(2)
    run.feed(0, "a\nb\n")
    run.feed(1, "b\na\n")
    run.wait(0)
    run.router.close()
    assert run.screen.lines[0] == "[rank 0] a"
    assert sorted(run.screen.lines[1:]) == ["[all] b", "[rank 1] a"]


def test_a_line_does_not_wait_for_a_rank_that_is_done() -> None:
    run = Run(2)
    run.router.rank_done(1)
    run.feed(0, "hello\n")
    run.wait(0)
    assert run.screen.text == "hello\n"


def test_a_rank_whose_peers_stay_silent_stops_waiting_until_one_prints() -> None:
    run = Run(2)
    for number in range(3):
        run.feed(0, f"{number}\n")
        run.wait(0.9)
        assert f"{number}" not in run.screen.text
        run.wait(0.2)
    run.feed(0, "3\n")
    run.wait(0)
    assert run.screen.lines == ["0", "1", "2", "3"]
    run.feed(1, "me too\n")
    run.wait(2)
    run.feed(0, "4\n")
    run.wait(0.5)
    assert run.screen.lines[-1] == "[rank 1] me too"


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["stdout", "stderr"]), st.sampled_from("abc"), st.integers(0, 12)),
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_no_line_is_lost_repeated_or_overtaken_within_its_rank(prints: list[tuple[int, str, str, int]]) -> None:
    run = Run(3)
    for rank, stream, text, tenths in prints:
        run.feed(rank, f"{text}\n", stream)
        run.wait(tenths / 10)
    run.router.close()
    speakers = {rank for rank, *_ in prints}
    shown: dict[int, list[tuple[str, str]]] = {rank: [] for rank in range(3)}
    untagged = []
    for stream, batch in run.screen.writes:
        for line in batch.splitlines():
            tag, _, text = line.rpartition("] ")
            if not tag:
                untagged.append((stream, text))
            for rank in range(3) if tag == "[all" else [int(tag[-1])] if tag else []:
                shown[rank].append((stream, text))
    for rank, stream in itertools.product(speakers, ("stdout", "stderr")):
        printed = [text for of_rank, of_stream, text, _ in prints if (of_rank, of_stream) == (rank, stream)]
        texts = [text for of_stream, text in shown[rank] if of_stream == stream]
        first = len(printed) - len(texts)
        assert texts == printed[first:]
        assert first == 0 or printed[:first] == [text for of_stream, text in untagged if of_stream == stream]


def test_a_line_of_one_rank_alone_is_not_overtaken_by_a_later_line_of_all() -> None:
    run = Run(2)
    run.feed(0, "only I\n")
    run.feed(0, "all of us\n")
    run.feed(1, "all of us\n")
    run.router.close()
    assert run.screen.lines == ["[rank 0] only I", "[all] all of us"]


def test_lines_of_two_streams_that_arrive_in_different_orders_are_still_one() -> None:
    run = Run(2)
    for rank, streams in enumerate((("stdout", "stderr"), ("stderr", "stdout"))):
        for stream in streams:
            run.feed(rank, f"{stream}\n", stream)
    run.router.close()
    assert sorted(run.screen.lines) == ["stderr", "stdout"]


# Shown ranks and the log --------------------------------------------------------------------------------------------


def test_only_shown_ranks_are_shown_and_everything_is_logged() -> None:
    log = io.BytesIO()
    run = Run(2, shown_ranks=[1], log=log)
    run.feed(0, "first\nsecond")
    run.feed(1, "tail without newline")
    run.feed(0, " half\n")
    assert run.end() == ["tail without newline"]
    assert log.getvalue() == b"[rank 0] first\n[rank 0] second half\n[rank 1] tail without newline\n"


def test_lines_of_a_choice_of_ranks_are_never_called_lines_of_all() -> None:
    run = Run(3, shown_ranks=[0, 2])
    for rank in range(3):
        run.feed(rank, "x\n")
    assert run.end() == ["x", "[rank 2] x"]


def test_a_log_that_cannot_be_written_ends_and_says_so() -> None:
    class FullDisk(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    run = Run(1, log=FullDisk())
    run.feed(0, "x\n")
    run.wait(0.1)
    run.feed(0, "y\n")
    run.router.close()
    assert "the log of this run ends here, it could not be written: [Errno 28] No space left" in run.screen.text
    assert run.screen.lines.count("x") == run.screen.lines.count("y") == 1


# Floods -------------------------------------------------------------------------------------------------------------


def test_a_hundred_megabytes_show_beginning_and_end_and_are_all_in_the_log(tmp_path: Path) -> None:
    chunk = b"".join(b"line %06d %s\n" % (number, b"x" * 66) for number in range(800))
    with (tmp_path / "run.log").open("wb") as log:
        run = Run(1, log=log)
        start = process_time()
        for _ in range(1600):
            run.router.feed(0, "stdout", chunk)
        run.feed(0, "END\n")
        seconds = process_time() - start
        lines = run.end()
    assert seconds < 12  # about 0.3 on two idle cores
    assert lines[0] == "line 000000 " + "x" * 66
    assert lines[-3:-1] == ["line 000799 " + "x" * 66, "END"]
    assert 1_000_000 < len(run.screen.text) < 1_500_000
    note, end = [line for line in lines if "hidden" in line]
    hidden = int(note.split()[1].replace(",", ""))
    assert end == note == run.screen.lines[-1], "said where they are missing, and at the end, where it is read"
    assert note == f"... {hidden:,} lines hidden, all of them are in {tmp_path / 'run.log'}"
    assert hidden + len(lines) - 2 == 1600 * 800 + 1
    assert (tmp_path / "run.log").stat().st_size == 1600 * 800 * (79 + len("[rank 0] ")) + len("[rank 0] END\n")


def test_a_notebook_keeps_the_first_lines_one_now_and_then_and_the_last_ones(tmp_path: Path) -> None:
    with (tmp_path / "run.log").open("wb") as log:
        run = Run(2, log=log, kept_bytes=KEPT_BYTES)
        for number in range(20_000):
            run.feed(number % 2, f"{number:05} {'x' * 90}\n")
            run.wait(0.01)
        for number in range(20_000, 20_100):  # rank 0 has nothing more to say
            run.feed(1, f"{number:05} {'x' * 90}\n")
        lines = run.end()
    numbers = [int(line.split()[2]) for line in lines if "x" * 90 in line]
    assert numbers[:1690] == list(range(1690))
    assert numbers[-35:] == list(range(20_100 - 35, 20_100))
    of_rank_0 = [number for line in lines if "[rank 0]" in line for number in [int(line.split()[2])]]
    assert of_rank_0[-10:] == list(range(20_000 - 20, 20_000, 2))
    assert of_rank_0 == sorted(of_rank_0)
    assert 10 < len(numbers[1690:-80]) < 120  # of more than three minutes
    assert len(run.screen.text) < 200_000
    where = f"all of them are in {tmp_path / 'run.log'}"
    (cut,) = [line for line in lines if "from here on" in line]
    assert cut == f"... from here on a line now and then, and the last ones, {where}"
    assert lines[-1] == f"... {20_100 - len(numbers):,} lines hidden, {where}"
    assert run.router.due_in() is None


def test_a_long_flood_stays_below_the_rate_and_ends_with_its_end() -> None:
    run = Run(2, bytes_per_s=400_000)
    for number in range(600):
        for rank in (0, 1):
            run.feed(rank, f"{rank} {number:06} {'x' * 90}\n" * 100)
        run.wait(0.01)
    in_time = len(run.screen.text)
    run.wait(3)
    assert in_time <= 1_000_000 + 6 * 400_000 + 100_000
    for rank in (0, 1):
        assert f"[rank {rank}] {rank} 000599 " in run.screen.text
    assert len([line for line in run.screen.lines if "hidden" in line]) <= 20
    assert run.router.due_in() is None


def test_the_last_lines_of_every_rank_survive_a_close_in_the_middle_of_a_flood() -> None:
    run = Run(2)
    for rank in (0, 1):
        run.feed(rank, "".join(f"{rank} {number}\n" for number in range(200_000)) + f"END {rank}\n")
    run.router.close()
    assert "[rank 0] END 0" in run.screen.lines
    assert "[rank 1] END 1" in run.screen.lines
    assert "lines hidden, they came too fast for a notebook" in run.screen.text


def test_a_quiet_minute_saves_nothing_up_for_a_flood() -> None:
    run = Run(1)
    run.feed(0, "begins\n")
    run.wait(60)
    run.feed(0, f"{'x' * 99}\n" * 50_000)
    run.wait(0.1)
    assert len(run.screen.text) < 1_200_000


def test_a_flood_of_empty_lines_is_cut_like_any_other() -> None:
    """Each takes as long as a full one: a million of them would be a quarter of a minute of the kernel's time."""
    run = Run(1)
    for _ in range(20):
        run.feed(0, "\n" * 50_000)
    run.wait(0.1)
    assert 10_000 < run.screen.text.count("\n") < 50_000


@pytest.mark.full
@pytest.mark.slow
def test_memory_stays_bounded_whatever_a_rank_prints() -> None:
    program = (
        "import resource\n"
        "from nbaccel.output.router import OutputRouter\n"
        "class Screen:\n    has_room_for_bars = False\n    def write(self, stream, text): pass\n"
        "router = OutputRouter(2, Screen())\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for text in (b'x' * 79 + b'\\n', b'x' * 79 + b'\\r', b'x', b'\\n', b'x' * 79 + b'\\x1b[A\\n'):\n"
        "    for _ in range(10_000_000 // 65536):\n"
        "        router.feed(0, 'stdout', text * (65536 // len(text)))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40_000  # KiB


# Bars ---------------------------------------------------------------------------------------------------------------


def test_states_of_a_bar_are_redrawn_in_place_and_the_last_one_is_kept() -> None:
    run = Run(1)
    for percent in range(0, 101):
        run.feed(0, f"\r{percent:3}%|{'#' * (percent // 10):10}|", "stderr")
        run.wait(0.01)
    run.feed(0, "\n", "stderr")
    run.wait(1)
    run.feed(0, "after\n")
    run.router.close()
    assert len(run.screen.writes) <= 8  # four a second
    assert all(text.startswith("\r") for _, text in run.screen.writes[:-1])
    assert run.screen.visible == ["100%|##########|", "after", ""]


def test_a_shorter_state_leaves_nothing_of_the_longer_one() -> None:
    run = Run(1)
    run.feed(0, "\rdownloading a long name")
    run.wait(0.5)
    run.feed(0, "\rdone" + " " * 19)
    run.wait(0.5)
    assert run.screen.visible == ["done"]
    assert run.screen.writes[-1] == ("stdout", "\r" + "done".ljust(len("downloading a long name")))


def test_lines_are_written_above_the_bar() -> None:
    run = Run(1)
    run.feed(0, "\r 10%|#         |")
    run.wait(0.5)
    run.router.feed(0, "stdout", b"\r" + b" " * 20 + b"\rloss 1\n\r 20%|##        |")
    run.wait(0.5)
    assert run.screen.visible == ["loss 1", " 20%|##        |"]


def test_a_line_of_the_other_stream_wipes_the_bar_first() -> None:
    run = Run(1)
    run.feed(0, "\r 10%|#   |", "stderr")
    run.wait(0.5)
    run.feed(0, "loss 1\n")
    run.wait(0.5)
    assert run.screen.writes[1:] == [
        ("stderr", "\r" + " " * 10 + "\r"),
        ("stdout", "loss 1\n"),
        ("stderr", "\r 10%|#   |"),
    ]


@pytest.mark.parametrize("has_room_for_bars", [True, False])
def test_a_line_that_follows_a_bar_stands_below_its_last_state(has_room_for_bars: bool) -> None:
    run = Run(2, has_room_for_bars)
    for epoch in range(2):
        run.feed(0, f"\repoch {epoch}: 50%|##  | 1/2 [00:00<00:00, 9.9it/s]", "stderr")
        run.wait(1.0)
        run.feed(0, f"\repoch {epoch}: 100%|####| 2/2 [00:01<00:00, 9.9it/s]\n", "stderr")
        for rank in range(2):
            run.feed(rank, f"epoch {epoch}: loss 0.5\n")
    run.end()
    kinds = [re.sub(r"epoch (\d).*(%|loss).*", r"\1\2", row) for row in run.screen.visible if row]
    assert kinds == ["0%", "0loss", "1%", "1loss"]


def test_bars_are_on_the_stream_that_is_asked_for() -> None:
    run = Run(1, bars_on="stdout")
    run.feed(0, "\r50%|##  | 1/2 [00:00<00:00, 9.9it/s]", "stderr")
    run.wait(1.0)
    run.feed(0, "\r100%|####| 2/2 [00:01<00:00, 9.9it/s]\na warning\n", "stderr")
    run.end()
    assert {stream for stream, text in run.screen.writes if "%" in text} == {"stdout"}
    assert ("stderr", "a warning\n") in run.screen.writes


def test_every_ranks_bar_is_live_in_one_line_and_its_last_state_is_kept() -> None:
    run = Run(2)
    for percent in (0, 50, 100):
        for rank in (0, 1):
            run.feed(rank, f"\rtrain {percent + rank}%", "stderr")
        run.wait(0.5)
    assert "[rank 0] train 50%" in run.screen.text
    assert re.search(r"\r\[rank 0\] train 50% +\[rank 1\] train 51%", run.screen.text)
    for rank in (0, 1):
        run.feed(rank, "\n", "stderr")
    run.wait(2)
    assert [row for row in run.screen.visible if row] == ["[rank 0] train 100%", "[rank 1] train 101%"]


def test_bars_have_rows_of_their_own_where_there_is_room_and_leave_no_trace_in_the_text() -> None:
    run = Run(3, has_room_for_bars=True)
    run.feed(0, "\router 1/3\n\rinner 10%", "stderr")
    assert run.screen.bars[-1] == ["outer 1/3", "inner 10%"]
    run.feed(2, "\r\x1b[32mouter 2/3\x1b[0m", "stderr")
    run.feed(1, "loss 1\n")
    run.wait(0.5)
    assert run.screen.bars[-1] == ["[rank 0] inner 10%", "[rank 2] outer 2/3"]
    run.feed(0, "\n", "stderr")
    run.feed(2, "\r\x1b[32mouter 3/3\x1b[0m", "stderr")
    run.router.close()
    assert run.screen.bars[-1] == []
    assert sorted(run.screen.lines) == [
        "[rank 0] inner 10%",
        "[rank 0] outer 1/3",
        "[rank 1] loss 1",
        "[rank 2] \x1b[32mouter 3/3\x1b[0m",
    ]
    assert "\r" not in run.screen.text


def test_only_bars_of_shown_ranks_are_live() -> None:
    run = Run(2, has_room_for_bars=True, shown_ranks={1})
    for rank in (0, 1):
        run.feed(rank, f"\rof rank {rank}", "stderr")
    assert run.screen.bars[-1] == ["of rank 1"]


def test_a_rank_that_dies_with_its_bar_leaves_the_last_state_of_it() -> None:
    run = Run(2, has_room_for_bars=True)
    for rank in (0, 1):
        run.feed(rank, f"\rof rank {rank}: 37%", "stderr")
    run.router.rank_done(1)
    assert run.screen.bars[-1] == ["[rank 0] of rank 0: 37%"]
    run.router.close()
    assert run.screen.lines == ["[rank 1] of rank 1: 37%", "[rank 0] of rank 0: 37%"]


def test_the_line_of_many_bars_is_as_wide_as_a_terminal_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "81")
    run = Run(8)
    for rank in range(8):
        run.feed(rank, f"\rtrain: {rank}0%|{'#' * 40}|", "stderr")
    run.wait(0.5)
    shown = run.screen.visible[0]
    assert len(shown) == 80
    assert shown.startswith("[rank 0] train: 00%|####")
    assert "[rank 2] train: 20%|" in shown
    assert shown.endswith("  +5")


def test_a_bar_that_was_wiped_leaves_no_line() -> None:
    run = Run(1)
    run.feed(0, "\r 10%|#   |")
    run.wait(0.5)
    run.feed(0, "\r" + " " * 10 + "\r")
    run.wait(2)
    run.feed(0, "next\n")
    run.router.close()
    assert run.screen.visible == ["next", ""]


@pytest.mark.parametrize("world_size", [1, 2])
def test_nested_bars_of_real_tqdm_keep_their_lines_whole(world_size: int) -> None:
    program = (
        "import time\nfrom tqdm import tqdm\n"
        "for epoch in tqdm(range(3), desc='epochs', mininterval=0):\n"
        "    for batch in tqdm(range(5), desc=f'epoch {epoch}', mininterval=0, leave=False): time.sleep(0.001)\n"
        "    tqdm.write(f'loss {epoch}')\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    run = Run(world_size)
    for start in range(0, len(output.stderr), 40):
        run.router.feed(0, "stderr", output.stderr[start : start + 40])
        run.wait(0.01)
    run.router.feed(0, "stdout", output.stdout)
    run.wait(2)
    run.router.close()
    shown = [row for row in run.screen.visible if row]
    assert sorted(row for row in shown if row.startswith("loss")) == ["loss 0", "loss 1", "loss 2"]
    (bar,) = [row for row in shown if not row.startswith("loss")]
    assert bar.startswith("epochs: 100%|")
    assert "\x1b" not in run.screen.text


TQDM = """
import sys
from tqdm import tqdm, trange
for epoch in trange(2, desc="epochs", mininterval=0):
    with tqdm(total=4, desc=f"epoch {epoch}", mininterval=0) as bar:
        for batch in range(4):
            bar.set_postfix(loss=f"{1 / (batch + 1):.2f}")
            bar.update()
for _ in tqdm(range(3), desc="gone", mininterval=0, leave=False):
    pass
print("between", flush=True)
broken = tqdm(total=10, desc="broken", mininterval=0)
broken.update(4)
raise SystemExit("enough")
"""


def test_last_states_of_all_kinds_of_tqdm_bars_are_right_for_every_rank() -> None:
    done = subprocess.run([sys.executable, "-c", TQDM], capture_output=True, check=False)
    run = Run(2, has_room_for_bars=True)
    for start in range(0, len(done.stderr), 33):
        for rank in (0, 1):
            run.router.feed(rank, "stderr", done.stderr[start : start + 33])
        run.wait(0.005)
    run.router.close()
    seen = {
        re.sub(r" *\d+%.*", "", row.removeprefix(f"[rank {rank}] "))
        for rows in run.screen.bars
        for rank in (0, 1)
        for row in rows
    }
    assert {"epochs:", "epoch 0:", "epoch 1:", "gone:"} <= seen
    assert {row.partition("] ")[0] for rows in run.screen.bars for row in rows if rows} >= {"[rank 0", "[rank 1"}
    for start in ("epochs: 100%|", "epoch 0: 100%|", "epoch 1: 100%|", "broken:  40%|"):
        last = [line for line in run.screen.lines if start in line]
        assert last, run.screen.text
    assert "loss=0.25" in run.screen.text
    assert "gone" not in run.screen.text
    assert "\r" not in run.screen.text


def test_an_inner_bar_that_stays_is_not_torn_by_the_longer_outer_one_that_it_is_drawn_over() -> None:
    program = (
        "from tqdm import tqdm\n"
        "outer = tqdm(total=10, desc='a long description', mininterval=0)\n"
        "outer.update(4)\n"
        "for _ in tqdm(range(5), mininterval=0): pass\n"
        "outer.close()\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    for size in (7, 4096):
        run = Run(1, has_room_for_bars=True)
        for start in range(0, len(output.stderr), size):
            run.router.feed(0, "stderr", output.stderr[start : start + size])
        inner, outer = run.end()
        assert re.fullmatch(r"100%\|█+\| 5/5 \[[^\]]*\]", inner)
        assert re.fullmatch(r"a long description:  40%\|█+ +\| 4/10 \[[^\]]*\]", outer)


def test_nor_is_one_that_became_shorter_with_its_last_state() -> None:
    run = Run(1, has_room_for_bars=True)
    run.feed(0, "\ra long description:  40%|####      | 4/10 [00:00<00:00, 762600.73it/s]")
    run.feed(0, "\n\r 80%|####  | 4/5 [00:00<00:00, 10125.99it/s]\x1b[A")
    run.feed(0, "\r100%|######| 5/5 [00:00<00:00, 9125.99it/s] \n")
    assert run.end()[0] == "100%|######| 5/5 [00:00<00:00, 9125.99it/s]"


def test_bars_that_stay_are_all_kept() -> None:
    run = Run(1)
    for name in ("a", "b"):
        for percent in (0, 100):
            run.feed(0, f"\r{name} {percent}%")
            run.wait(0.3)
        run.feed(0, "\n")
        run.wait(0.3)
    run.router.close()
    assert run.screen.visible == ["a 100%", "b 100%", ""]


def test_colours_pass_and_windows_line_ends_are_line_ends() -> None:
    run = Run(1)
    run.feed(0, "\x1b[31mred\x1b[0m\r\nplain\r\n")
    assert run.end() == ["\x1b[31mred\x1b[0m", "plain"]


def test_lines_that_end_as_in_windows_are_no_bars() -> None:
    run = Run(1, has_room_for_bars=True)
    run.feed(0, "loading\r\n  two blanks  \r\n")
    run.wait(0)
    assert run.screen.text == "loading\n  two blanks  \n"
    assert not any(run.screen.bars)


# Rich output --------------------------------------------------------------------------------------------------------


def rich(text: str, kind: str = "display", display_id: str | None = None, wait: bool = False) -> dict[str, Any]:
    return {"kind": kind, "data": {"text/plain": text}, "metadata": {}, "display_id": display_id, "wait": wait}


def shown_at_the_end(screen: RecordingScreen) -> list[str]:
    """Displays as a front end holds them after all updates."""
    displays: dict[str, str] = {}
    for message in screen.rich:
        assert message["kind"] in ("display", "update")
        if message["kind"] == "display" or message["display_id"] in displays:
            displays[message["display_id"]] = message["data"]["text/plain"]
    return list(displays.values())


def test_a_display_comes_after_the_text_before_it() -> None:
    run = Run(2)
    run.feed(0, "before\n")
    run.router.publish(0, rich("figure"))
    run.feed(0, "after\n")
    run.router.close()
    assert [kind for kind, _ in run.screen.calls] == ["stdout", "rich", "stdout"]


def test_a_bar_that_just_ended_comes_before_the_display_after_it() -> None:
    run = Run(1)
    run.feed(0, "\r100%\n")
    run.router.publish(0, rich("figure"))
    assert run.screen.calls[0] == ("stdout", "100%\n")
    assert run.screen.rich


def test_only_the_first_shown_ranks_displays_are_shown_and_the_others_noted_in_the_log() -> None:
    log = io.BytesIO()
    run = Run(2, log=log)
    run.router.publish(1, rich("of rank 1"))
    run.router.publish(0, rich("of rank 0"))
    run.router.close()
    assert shown_at_the_end(run.screen) == ["of rank 0"]
    assert log.getvalue() == b"[rank 1] (rich output of this rank is not shown: text/plain)\n[rank 0] of rank 0\n"


def test_the_text_of_rich_output_is_in_the_log_after_what_was_printed_before_it() -> None:
    log = io.BytesIO()
    run = Run(1, log=log)
    run.router.feed(0, "stdout", b"first")
    run.router.publish(0, rich("two\nlines"))
    run.router.publish(0, rich("of a bar", "update", "panel"))
    run.router.feed(0, "stdout", b"last\n")
    run.router.close()
    assert log.getvalue().decode().splitlines() == [f"[rank 0] {line}" for line in ("first", "two", "lines", "last")]


def test_display_ids_that_a_program_gives_are_the_notebooks_and_others_are_unique() -> None:
    ids = set()
    for _ in range(2):
        run = Run(1)
        run.router.publish(0, rich("0", display_id="status"))
        run.router.publish(0, rich("1", "update", "status"))
        run.router.publish(0, rich("2"))
        assert shown_at_the_end(run.screen) == ["1", "2"]
        ids |= {message["display_id"] for message in run.screen.rich}
    assert len(ids) == 3
    assert "status" in ids


def test_a_rank_updates_a_display_of_an_earlier_cell_and_none_of_ours() -> None:
    run = Run(1)
    run.router.publish(0, rich("x", "update", "status"))
    run.router.publish(0, rich("y", "update", "nbaccel-run-1"))
    run.router.publish(0, rich("z", display_id="nbaccel-run-1"))
    ids = [message["display_id"] for message in run.screen.rich]
    assert ids[0] == "status"
    assert "nbaccel-run-1" not in ids


def test_after_clear_output_the_next_display_takes_the_place_of_the_last() -> None:
    run = Run(1)
    for number in range(3):
        run.router.publish(0, rich("", "clear", wait=True))
        run.router.publish(0, rich(f"figure {number}"))
    run.router.close()
    assert [message["kind"] for message in run.screen.rich] == ["display", "update", "update"]
    assert shown_at_the_end(run.screen) == ["figure 2"]


def test_fewer_displays_after_a_clear_blank_the_places_that_are_left() -> None:
    run = Run(1)
    for text in ("a", "b", "c"):
        run.router.publish(0, rich(text))
    run.router.publish(0, rich("", "clear", wait=True))
    run.router.publish(0, rich("only"))
    run.router.close()
    assert shown_at_the_end(run.screen) == ["only", "", ""]


def test_clear_output_without_wait_blanks_at_once() -> None:
    run = Run(1)
    run.router.publish(0, rich("a"))
    run.router.publish(0, rich("", "clear"))
    assert shown_at_the_end(run.screen) == [""]


def test_clear_output_leaves_text_alone() -> None:
    run = Run(1)
    run.feed(0, "text\n")
    run.router.publish(0, rich("", "clear"))
    run.router.close()
    assert run.screen.calls == [("stdout", "text\n")]


# The console --------------------------------------------------------------------------------------------------------


def test_the_console_writes_to_the_streams_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    router = OutputRouter(1, ConsoleScreen())
    router.feed(0, "stdout", b"out\n")
    router.feed(0, "stderr", b"err\n")
    router.publish(0, rich("<figure>"))
    router.close()
    assert capsys.readouterr() == ("out\n<figure>\n", "err\n")


def test_the_console_writes_to_given_streams() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    router = OutputRouter(1, ConsoleScreen(stdout, stderr))
    router.feed(0, "stderr", b"err\n")
    router.close()
    assert (stdout.getvalue(), stderr.getvalue()) == ("", "err\n")
