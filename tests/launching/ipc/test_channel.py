from __future__ import annotations

import os
import socket
import threading

import pytest

from nbaccel.launching.ipc.channel import Channel, MarkedPipe


def test_a_frame_arrives_as_it_was_sent() -> None:
    here, there = Channel.pair()
    here.send({"op": "x", "text": "ä\n", "n": [1, 2.5, None]})
    assert there.receive() == ({"op": "x", "text": "ä\n", "n": [1, 2.5, None]}, [])
    here.close()
    there.close()


def test_descriptors_travel_with_their_frame_and_not_with_its_neighbours() -> None:
    here, there = Channel.pair()
    read, write = os.pipe()
    here.send({"n": 0})
    here.send({"n": 1}, [read, write])
    here.send({"n": 2})
    frames = [there.receive() for _ in range(3)]
    assert [len(frame[1]) for frame in frames if frame] == [0, 2, 0]
    assert frames[1] is not None
    assert not any(map(os.get_inheritable, frames[1][1])), "programs that a rank starts would hold them"
    os.write(frames[1][1][1], b"through")
    assert os.read(read, 100) == b"through"
    for fd in (read, write, *frames[1][1]):
        os.close(fd)
    here.close()
    there.close()


def test_a_channel_waits_whatever_time_limit_the_program_gives_its_own_connections() -> None:
    socket.setdefaulttimeout(0.01)
    try:
        here, there = Channel.pair()
        late = threading.Timer(0.1, here.send, ({"op": "x"},))
        late.start()
        assert there.receive() == ({"op": "x"}, [])
    finally:
        socket.setdefaulttimeout(None)
    late.join()
    here.close()
    there.close()


@pytest.mark.parametrize("size", [10, 300_000, 3_000_000])
def test_a_frame_larger_than_the_socket_buffer_arrives_whole(size: int) -> None:
    here, there = Channel.pair()
    sender = threading.Thread(target=here.send, args=({"data": "x" * size},))
    sender.start()
    frame = there.receive()
    sender.join()
    assert frame is not None
    assert len(frame[0]["data"]) == size
    here.close()
    there.close()


def test_drain_takes_what_is_there_and_does_not_wait() -> None:
    here, there = Channel.pair()
    assert list(there.drain()) == []
    here.send({"n": 1})
    here.send({"n": 2})
    assert [message["n"] for message, _ in there.drain()] == [1, 2]
    assert there.is_open
    here.close()
    assert list(there.drain()) == []
    assert not there.is_open
    there.close()


def test_receive_ends_when_the_other_side_is_gone() -> None:
    here, there = Channel.pair()
    here.close()
    assert there.receive() is None
    there.close()


def test_descriptors_that_nobody_took_are_closed_with_the_channel() -> None:
    here, there = Channel.pair()
    read, write = os.pipe()
    here.send({"n": 1}, [write])
    os.close(write)
    there._read(0)
    there.close()
    assert os.read(read, 1) == b"", "the last writing end is closed"
    os.close(read)
    here.close()


def test_a_mark_is_found_wherever_two_reads_cut_it() -> None:
    text = b"before\x1enonce:7\x1eafter"
    for cut in range(len(text) + 1):
        read, write = os.pipe()
        pipe, pieces = MarkedPipe(read, 0, "stdout", "nonce"), []
        for part in (text[:cut], text[cut:]):
            os.write(write, part)
            pieces += pipe.read() or []
        os.close(write)
        pieces += pipe.read() or []
        pipe.close()
        at = pieces.index(7)
        before, after = (b"".join(text for _, text in part) for part in (pieces[:at], pieces[at + 1 :]))
        assert (before, after) == (b"before", b"after"), f"cut at {cut}"


def test_a_mark_changes_the_stream_wherever_two_reads_cut_it() -> None:
    text = b"out\x1enonce:stderr\x1eerr\x1enonce:stdout\x1eout again"
    for cut in range(len(text) + 1):
        read, write = os.pipe()
        pipe, streams = MarkedPipe(read, 0, "stdout", "nonce"), {"stdout": b"", "stderr": b""}
        for part in (text[:cut], text[cut:]):
            os.write(write, part)
            for stream, piece in pipe.read() or []:
                streams[stream] += piece
        os.close(write)
        pipe.close()
        assert streams == {"stdout": b"outout again", "stderr": b"err"}, f"cut at {cut}"
