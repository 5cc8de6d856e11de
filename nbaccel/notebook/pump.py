"""Pump: passes messages of some widgets to the kernel while a cell keeps its main thread busy. Runs in that thread.

A kernel handles one shell message after the other, so a click waits until the cell is over. ipykernel 7.0 to 7.3 let a
front end send it on a separate thread; others do not, and a front end need not. The pump reads messages meanwhile where
the kernel would: those for its widgets are handled, all others (cells, other widgets, whose callbacks expect no running
cell) are kept in their order and handed back when the cell ends.

It relies on private parts of ipykernel and pyzmq. If one is missing, `Pump.of` returns None, and nothing was touched.
"""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Any, Self

__all__ = ["Pump"]

_MOST_AT_ONCE = 100
"""Messages per poll: a flood of them must not keep the run from its own work."""

_KINDS = ("comm_msg", "comm_close")


class Pump:
    """Handles, by `poll`, the messages for `comm_ids`, a live collection, between `with` and its end.

    `poll`, and the end of `with`, are for the main thread, inside a cell.
    """

    def __init__(self, kernel: Any, stream: Any, comm_ids: Collection[str]) -> None:
        self._kernel = kernel
        self._stream = stream
        self._comm_ids = comm_ids
        self._kept: list[Any] = []

    @classmethod
    def of(cls, kernel: Any, comm_ids: Collection[str]) -> Self | None:
        """Return a pump; None if this kernel has no place to read from: then a front end's Stop is the interrupt."""
        stream = _main_stream(kernel)
        has_all = (
            all(hasattr(stream, name) for name in ("socket", "flush", "io_loop", "_run_callback", "_recv_copy"))
            and getattr(stream, "_recv_callback", None) is not None
            and hasattr(kernel, "comm_manager")
            and hasattr(kernel, "_publish_status")
            and hasattr(getattr(kernel, "session", None), "feed_identities")
        )
        return cls(kernel, stream, comm_ids) if has_all else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def poll(self) -> None:
        """Handle the messages that have arrived; never wait."""
        import zmq

        for _ in range(_MOST_AT_ONCE):
            try:
                frames = self._stream.socket.recv_multipart(zmq.NOBLOCK, copy=self._stream._recv_copy)
            except zmq.Again:
                return
            if not (self._is_for_us(frames) and self._handle(frames)):
                self._kept.append(frames)

    def close(self) -> None:
        """Hand back the kept messages, in their order and before all later ones.

        It does so at once, not in a later turn of the event loop: if the cell has failed, the kernel is about to drop
        the cells that wait after it, and the kept ones are among them.
        """
        kept, self._kept = self._kept, []
        for frames in kept:
            self._stream._run_callback(self._stream._recv_callback, frames)
        self._stream.io_loop.add_callback(self._stream.flush)  # the socket was read past the stream, which rechecks it

    def _is_for_us(self, frames: list[Any]) -> bool:
        """Return whether this is a message for one of the pump's widgets.

        It reads the message unchecked, so that the kernel can check it.
        """
        try:
            _, parts = self._kernel.session.feed_identities(frames, copy=False)
            header, content = (self._kernel.session.unpack(bytes(parts[at].bytes)) for at in (1, 4))
            return header["msg_type"] in _KINDS and content["comm_id"] in self._comm_ids
        except Exception:  # the kernel handles any other message
            return False

    def _handle(self, frames: list[Any]) -> bool:
        """Handle a message as the kernel would, with the running cell as the parent of the callbacks' output.

        It returns False for a message without a valid signature: the kernel reports it when it handles it.
        """
        kernel = self._kernel
        identity, parts = kernel.session.feed_identities(frames, copy=False)
        try:
            message = kernel.session.deserialize(parts, content=True, copy=False)
        except Exception:
            return False
        kernel._publish_status("busy", "shell", parent=message)
        try:
            getattr(kernel.comm_manager, message["msg_type"])(self._stream, identity, message)
        finally:
            kernel._publish_status("idle", "shell", parent=message)  # front ends send the next one after this
            kernel._publish_status("busy", "shell")  # and think that the cell is over, unless told otherwise
        return True


def _main_stream(kernel: Any) -> Any:
    """Return the stream that brings shell messages to the main thread; None if it is not found."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None:  # ipykernel 6
        return getattr(kernel, "shell_stream", None)
    pair = getattr(getattr(thread, "manager", None), "_shell_channel_to_main", None)
    return getattr(pair, "to_stream", None)
