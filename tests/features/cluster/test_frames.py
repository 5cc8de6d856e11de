"""Frames cross a stream of bytes whole, and a slow reader makes nobody wait."""

from __future__ import annotations

import os

import pytest

from nbaccel.features.cluster.frames import Frame, FrameReader, FrameWriter, pieces_of, read_some


def test_frames_arrive_whole_whatever_the_pieces_of_the_stream() -> None:
    sent = [Frame("out", {"rank": 1}, b"\x00" * 5), Frame("ping"), Frame("message", {"text": "\u00e9"}, b"x")]
    data = b"".join(frame.encoded() for frame in sent)
    for size in (1, 7, len(data)):
        reader = FrameReader()
        got = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
        assert [(frame.op, frame.fields, bytes(frame.blob)) for frame in got] == [
            (frame.op, frame.fields, bytes(frame.blob)) for frame in sent
        ]


def test_what_is_no_frame_is_refused_before_memory_is_taken_for_it() -> None:
    with pytest.raises(ValueError, match="no frame of nbaccel"):
        list(FrameReader().feed(b"Welcome to the machine room, please log in\n"))


def test_a_slow_reader_holds_the_writer_up_in_nothing_and_gets_all_in_order() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    writer, reader = FrameWriter(write_fd), FrameReader()
    memory = os.memfd_create("test")
    os.write(memory, b"a" * 3_000_000)
    writer.send_each(pieces_of(memory, of="payload"))
    writer.send(Frame("start"))
    writer.send_first(Frame("pong"))
    assert writer.has_waiting
    got: list[Frame] = []
    while writer.has_waiting or "start" not in [frame.op for frame in got]:
        got += reader.feed(read_some(read_fd) or b"")
        writer.flush()
    ops = [frame.op for frame in got]
    assert sum(len(frame.blob) for frame in got if frame.op == "piece") == 3_000_000
    assert ops[-1] == "start"
    assert "pong" in ops[:2]
    writer.close()
    os.close(read_fd)
    os.close(memory)


def test_a_writer_whose_reader_is_gone_drops_what_it_gets() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    writer = FrameWriter(write_fd)
    writer.send(Frame("ping"))
    assert (writer.is_open, writer.has_waiting) == (False, False)
    writer.close()
