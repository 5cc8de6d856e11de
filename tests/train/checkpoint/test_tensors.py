"""Our safetensors files are the library's, byte for byte, and their checksum is that of the bytes on the disk."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from nbaccel.train.checkpoint import serialization as module
from nbaccel.train.checkpoint.manifest import FileRecord, SideThread
from nbaccel.train.checkpoint.serialization import knows_dtypes_of, write_tensors

DTYPES = tuple(module._NAMES)

Named = dict[str, torch.Tensor]

some_tensors = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name.isprintable() and name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)).map(
        lambda kind: torch.arange(int(torch.Size(kind[1]).numel())).reshape(kind[1]).to(kind[0])
    ),
    max_size=8,
)


@given(tensors=some_tensors, metadata=st.dictionaries(st.just("format"), st.just("pt")))
def test_the_file_is_the_librarys_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, tensors: Named, metadata: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("tensors")
    record = write_tensors(folder / "ours", tensors, metadata | {"format": "pt"})
    save_file(tensors, folder / "theirs", metadata=metadata | {"format": "pt"})
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    assert record == FileRecord.of(folder / "ours")


def test_tensors_of_many_chunks_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1000)
    tensors = {"a": torch.randn(777), "b": torch.randn(3, 1001).to(torch.bfloat16)}
    record = write_tensors(tmp_path / "file", tensors, {})
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert record == FileRecord.of(tmp_path / "file")


def test_the_disk_is_set_to_work_before_the_file_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(module, "_FLUSH_BYTES", 4000)
    monkeypatch.setattr(module, "_flush", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    write_tensors(tmp_path / "large", {"a": torch.zeros(10_000)}, {})
    assert 4000 <= sizes[0] < 40_000
    sizes.clear()
    write_tensors(tmp_path / "small", {"a": torch.zeros(500)}, {})
    assert sizes == []


def test_what_the_disk_refuses_meanwhile_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "on purpose")

    monkeypatch.setattr(module, "_FLUSH_BYTES", 4000)
    monkeypatch.setattr(module, "_flush", refuse)
    with pytest.raises(OSError, match="on purpose"):
        write_tensors(tmp_path / "file", {"a": torch.zeros(10_000)}, {})


def test_where_no_thread_can_be_had_its_maker_does_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(module, "_FLUSH_BYTES", 1)
    tensors = {"a": torch.arange(5), "b": torch.ones(3)}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        record = write_tensors(tmp_path / "file", tensors, {})
        with SideThread("test") as beside:
            assert beside.submit(max, [], default=3).result() == 3
            refused = beside.submit(int, "x")
    assert record == FileRecord.of(tmp_path / "file")
    assert load_file(tmp_path / "file")["a"].equal(tensors["a"])
    with pytest.raises(ValueError, match="invalid literal"):
        refused.result()


def test_work_that_found_no_thread_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    with SideThread("test") as beside:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            beside.submit(done.append, 1)
        beside.submit(done.append, 2)
    assert done == [1, 2]


def test_rarer_types_are_left_to_the_library() -> None:
    assert knows_dtypes_of({"a": torch.ones(2)})
    assert not knows_dtypes_of({"a": torch.ones(2), "b": torch.ones(2).to(torch.float8_e5m2)})
