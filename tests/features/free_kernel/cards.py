"""A stand-in for a card whose memory a notebook holds. Runs in the tests."""

from __future__ import annotations

from typing import Any

from nbaccel.features.free_kernel.models_on_host import CudaMemory


class FakeCards(CudaMemory):
    """A card whose memory is that of the host, and told by its address.

    room: how many memories fit on it again.
    """

    def __init__(self, room: int = 1000) -> None:
        super().__init__({0})
        self.room = room
        self.there: set[int] = set()
        self.released = 0

    @property
    def is_used(self) -> bool:
        return True

    def put(self, *tensors: Any) -> None:
        self.there |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def device_of(self, storage: Any) -> str:
        return "cuda:0" if storage.data_ptr() in self.there else ""

    def to_host(self, storage: Any) -> Any:
        return storage.clone()

    def back(self, storage: Any, device: str) -> Any:
        assert device == "cuda:0"
        if not self.room:
            return None
        self.room -= 1
        made = storage.clone()
        self.there.add(made.data_ptr())
        return made

    def release(self) -> None:
        self.released += 1
