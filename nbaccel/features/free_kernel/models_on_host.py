"""Models of the notebook that leave the GPUs while ranks use these (`--free-kernel`). Runs in the kernel.

`kernel_freed` moves models to the host (`ModelsOnHost`), into a file (`HostFile`) where ranks find them. If this
process has never used CUDA, it holds nothing, and nothing is asked.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from nbaccel.base.hardware import usable_memory
from nbaccel.base.quantised import is_quantised
from nbaccel.base.quantities import in_gb
from nbaccel.launching.earlier_models import places_of
from nbaccel.launching.kernel_holdings import Unmoved
from nbaccel.launching.processes.interaction import uninterrupted
from nbaccel.namespace.arrays import has_plain_memory
from nbaccel.namespace.payload import aligned, write_all
from nbaccel.namespace.tensor_devices import InFile, away_from, storage_on
from nbaccel.namespace.wrappers import plain

__all__ = [
    "CudaMemory",
    "ModelsOnHost",
    "kernel_freed",
    "models_on_host",
]

_MOST_OF_THE_HOST = 0.8
"""Share of the host's available memory that models may take: the loaders of the ranks need some, too."""

_TRIES, _PAUSE_S = 5, 0.4
"""Attempts to move back to a GPU, and their pause: the driver frees a killed process's memory 0.1 s later."""


def models_on_host(namespace: Mapping[str, Any], numbers: Collection[int]) -> ModelsOnHost:
    """Return what can leave the GPUs with these numbers, of the notebook's variables."""
    return ModelsOnHost(namespace, CudaMemory(numbers))


@contextmanager
def kernel_freed(aside: ModelsOnHost, say: Callable[[str], None]) -> Iterator[None]:
    """Keep models on the host during the block; `say` which these are, and afterwards if they could not be moved back.

    Raises:
        KeyboardInterrupt: An interrupt came while they were moved back; raised when that is done, or has been given up.
    """
    try:
        with aside:
            if line := str(aside):
                say(line)
            yield
    finally:
        if aside.trouble:
            say(aside.trouble)


class CudaMemory:
    """The memory of CUDA devices.

    Args:
        numbers: The devices that matter.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers

    @property
    def is_used(self) -> bool:
        """Return whether this process uses CUDA."""
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def device_of(self, storage: Any) -> str:
        """Return the GPU that holds the memory; empty if none does."""
        device = storage.device
        return str(device) if device.type == "cuda" and device.index in self._numbers else ""

    def to_host(self, storage: Any) -> Any:
        """Return a copy of the memory on the host."""
        return storage.cpu()

    def back(self, storage: Any, device: str) -> Any:
        """Return a copy of the host's memory on the GPU; None if the GPU is full."""
        torch: Any = sys.modules["torch"]
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return storage_on(torch.device(device), memoryview(flat.numpy()))

    def release(self) -> None:
        """Give the free memory of torch's allocator back to the driver."""
        cuda = sys.modules["torch"].cuda
        for number in range(cuda.device_count()):
            if cuda.memory_reserved(number):
                cuda.synchronize(number)  # see train/oom/memory/release: it would wait for the current card alone
        cuda.empty_cache()


@dataclass(slots=True)
class _Memory:
    """A storage and all tensors of the notebook's models that use it.

    Args:
        device: The GPU that it came from.
        host: Its copy on the host, once it was made.
    """

    storage: Any
    device: str
    tensors: dict[int, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    host: Any = None

    @property
    def is_shared(self) -> bool:
        """Return whether others use the storage: tensors that belong to no model, or the graph of a loss."""
        uses = getattr(sys.modules["torch"]._C, "_storage_Use_Count", None)
        if uses is None:
            return True
        # Only torch can say how many uses one tensor and this reference make.
        tensor = sys.modules["torch"].empty(1, device="cpu")
        storage = tensor.untyped_storage()
        return bool(uses(self.storage._cdata) != uses(storage._cdata) - 1 + len(self.tensors))


def _move(moves: Sequence[tuple[_Memory, Any]]) -> None:
    """Make all tensors of each memory use a storage of the same content; after an error none is changed."""
    torch: Any = sys.modules["torch"]
    before: list[tuple[Any, Any]] = []
    try:
        for memory, storage in moves:
            for tensor in memory.tensors.values():
                layout = tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
                moved = torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage, *layout)
                before.append((tensor, tensor.data))
                tensor.data = moved
    except BaseException:
        for tensor, data in before:
            tensor.data = data
        raise
    for memory, storage in moves:
        memory.storage = storage


class ModelsOnHost(Unmoved):
    """The models of `namespace` that can move to the host, and their optimizers; a block in which they are there.

    Parameters, buffers, gradients and the states of optimizers change their memory and stay the same objects;
    afterwards they are back on the GPU. Everything else is left where it is: single tensors, models that are quantised
    or spread over devices, and models whose memory is used elsewhere too.

    Objects that are sent to another process during the block arrive as if they were still on the GPU.

    Attributes:
        names: Bytes on GPUs by name.
        left: Names of models on GPUs that cannot be moved, and why.
        unread: Names of models and optimizers that could not be read.
        trouble: The text to show after the block; empty if everything is as before.
    """

    def __init__(self, namespace: Mapping[str, Any], cards: CudaMemory) -> None:
        self._cards = cards
        self._memories: list[_Memory] = []
        self._homes = ExitStack()
        self.left: dict[str, str] = {}
        self.unread: list[str] = []
        self.trouble = ""
        if cards.is_used:
            self._find(_unwrapped(namespace))

    @property
    def names(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for memory in self._memories:
            name = min(memory.names)
            found[name] = found.get(name, 0) + memory.storage.nbytes()
        return found

    def bytes_on(self, device: str) -> int:
        """Return the bytes that are freed on a GPU."""
        return sum(memory.storage.nbytes() for memory in self._memories if memory.device == device)

    def freed(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        return kernel_freed(self, say)

    # --- the block ---------------------------------------------------------------------------------------------

    def __enter__(self) -> ModelsOnHost:
        nbytes, available = sum(self.names.values()), usable_memory().available_bytes
        if available and nbytes > _MOST_OF_THE_HOST * available:
            self.left |= dict.fromkeys(self.names, f"the host has {in_gb(available)} available")
            self._memories = []
        try:
            if self._memories:
                places = self._copied_to_the_host()
                with uninterrupted():
                    _move([(memory, memory.host) for memory in self._memories])
                    homes = {memory.host.data_ptr(): memory.device for memory in self._memories}
                    self._homes.enter_context(away_from(homes, places))
                self._cards.release()
        except BaseException:
            self._come_back()
            raise
        return self

    def _copied_to_the_host(self) -> dict[int, InFile]:
        """Copy everything into one file of the host, and return the places by address: ranks share this copy."""
        file = HostFile()
        self._homes.callback(file.close)
        for memory in self._memories:
            file.add(self._cards.to_host(memory.storage))
        places = {}
        for memory, (storage, place) in zip(self._memories, file.storages(), strict=True):
            memory.host = storage
            places[storage.data_ptr()] = place
        return places

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._come_back()

    def _come_back(self) -> None:
        with uninterrupted():
            self._homes.close()
            if away := [memory for memory in self._memories if memory.storage is memory.host]:
                self._bring_back(away)
            for memory in self._memories:
                if memory.storage is not memory.host:  # an error's frames may keep this object
                    memory.host = None

    def _bring_back(self, away: Sequence[_Memory]) -> None:
        """Move everything back or nothing, and then set `trouble`: a model that is half on the host cannot compute."""
        where = " and ".join(sorted({memory.device for memory in away}))
        stays = (
            f"it stays there: {', '.join(self.names)}. When there is room, model.to({away[0].device!r}) moves a model "
            "back, and then optimizer.load_state_dict(optimizer.state_dict()) what its optimizer keeps."
        )
        try:
            if not self._has_brought_back(away):
                self.trouble = f"{where} has no room any more for what was moved to the host, and {stays}"
        except BaseException as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")  # errors of CUDA have more lines
            self.trouble = f"{where} does not take back what was moved to the host ({what}), and {stays}"
            if not isinstance(error, Exception):
                raise

    def _has_brought_back(self, away: Sequence[_Memory]) -> bool:
        for attempt in range(_TRIES):
            made: list[Any] = []
            for memory in away:
                storage = self._cards.back(memory.host, memory.device)
                if storage is None:
                    break
                made.append(storage)
            else:
                _move(list(zip(away, made, strict=True)))
                return True
            made.clear()
            self._cards.release()
            if attempt < _TRIES - 1:
                time.sleep(_PAUSE_S)
        return False

    # --- words -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return the names that were moved, and those that were left; empty if nothing was on a GPU."""
        moved = ", ".join(f"{name} {in_gb(nbytes)}" for name, nbytes in self.names.items())
        left = [f"{name} stays on the card: {why}" for name, why in self.left.items()]
        left += [f"{name} stays where it is: it cannot be read" for name in self.unread]
        return "; ".join(filter(None, [moved and f"on the host until the run is over: {moved}", *left]))

    # --- finding -----------------------------------------------------------------------------------------------

    def _find(self, values: Mapping[str, Any]) -> None:
        torch: Any = sys.modules["torch"]
        models = {name: value for name, value in values.items() if issubclass(type(value), torch.nn.Module)}
        optimizers = {name: value for name, value in values.items() if issubclass(type(value), torch.optim.Optimizer)}
        if graph := next((name for name, value in values.items() if type(value) is torch.cuda.CUDAGraph), None):
            for name, model in models.items():
                with suppress(Exception):  # see `_memories_of`; the model stays in any case
                    if any(map(self._device_of, _tensors_of(model))):
                        self.left[name] = f"the CUDA graph {graph} knows the addresses of what it uses"
            return
        while True:
            memories = self._memories_of(models, optimizers)
            shared = {name for memory in memories.values() if memory.is_shared for name in memory.names}
            for name in shared & models.keys():
                del models[name]
                self.left[name] = "other tensors, or the graph of a loss, use its memory"
            for name in shared & optimizers.keys():
                del optimizers[name]
            if not shared:
                break
        self._memories = list(memories.values())

    def _memories_of(self, models: dict[str, Any], optimizers: dict[str, Any]) -> dict[int, _Memory]:
        """Return the memory on GPUs by its storage.

        Objects that cannot be moved or read are taken out: classes may do anything.
        """
        memories: dict[int, _Memory] = {}
        parameters: set[int] = set()
        for name, model in list(models.items()):
            try:
                tensors = list(_tensors_of(model))
                is_on_card = any(map(self._device_of, tensors))
                why = _why_not(model, tensors) if is_on_card else ""
            except Exception:  # a module whose __init__ was not called has no parameters to ask for
                del models[name]
                self.unread.append(name)
                continue
            if not is_on_card or why:
                del models[name]
                self.left |= {name: why} if why else {}
            else:
                parameters |= set(map(id, tensors))
                self._add(memories, name, tensors)
        for name, optimizer in list(optimizers.items()):
            try:
                states = [state for parameter, state in _states_of(optimizer) if id(parameter) in parameters]
                tensors = [tensor for tensor in _tensors_in(states) if _is_plain(tensor)]
            except Exception:
                del optimizers[name]
                self.unread.append(name)
                continue
            self._add(memories, name, tensors)
        return memories

    def _add(self, memories: dict[int, _Memory], name: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if not (device := self._device_of(tensor)):
                continue
            storage = tensor.untyped_storage()
            if not storage.nbytes():  # frees nothing, and its copy would have no address to identify it
                continue
            memory = memories.setdefault(storage._cdata, _Memory(storage, device))
            memory.tensors[id(tensor)] = tensor
            memory.names.add(name)

    def _device_of(self, tensor: Any) -> str:
        try:
            return self._cards.device_of(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, lazy, a class without memory of its own
            return str(tensor.device) if tensor.is_cuda else ""


def _unwrapped(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a notebook, with the wrapped object of a wrapper, if it is known."""
    values = {name: value for name, value in namespace.items() if not name.startswith("_")}
    for name, value in values.items():
        with suppress(Exception):
            values[name] = plain(value)
    return values


def _tensors_of(model: Any) -> Iterator[Any]:
    """Yield parameters, buffers and gradients, ignoring overrides of these methods by the model's class."""
    module = sys.modules["torch"].nn.Module
    for tensor in (*module.parameters(model), *module.buffers(model)):
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _why_not(model: Any, tensors: Iterable[Any]) -> str:
    """Return why a model cannot be moved by its tensors alone; empty if it can."""
    if is_quantised(model):
        return "it was loaded quantised"
    if places_of(model) or any("_hf_hook" in vars(part) for part in model.modules()):
        return "it is spread over devices"
    return "" if all(map(_is_plain, tensors)) else "its tensors are of a kind of their own"


def _is_plain(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_plain_memory(tensor)
    return is_known and not tensor.is_inference()  # an inference tensor keeps its memory


def _states_of(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    state = getattr(optimizer, "state", None)
    yield from state.items() if isinstance(state, dict) else ()


def _tensors_in(value: Any) -> Iterator[Any]:
    if issubclass(type(value), sys.modules["torch"].Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


class HostFile:
    """Memory of the host in a file without a name, for objects that ranks need and this process keeps.

    A payload does not copy what is in it: ranks map the file, and so does this process, each copy-on-write. So what any
    of them writes later is not in the file, and this process packs no such object that it has changed since.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("nbaccel-host", os.MFD_CLOEXEC)
        self._places: list[tuple[int, int]] = []
        self._end = 0

    def add(self, storage: Any) -> None:
        """Write the bytes of a storage of the host."""
        torch: Any = sys.modules["torch"]
        with memoryview(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()) as source:
            offset = aligned(self._end, source.nbytes)
            write_all(self._fd, source, offset)
            self._places.append((offset, source.nbytes))
            self._end = offset + source.nbytes

    def storages(self) -> list[tuple[Any, InFile]]:
        """Return a storage of this process for each that was added, and its place in the file."""
        torch: Any = sys.modules["torch"]
        mapping = mmap.mmap(self._fd, self._end, access=mmap.ACCESS_COPY)
        flat = [
            torch.frombuffer(mapping, dtype=torch.uint8, offset=offset, count=nbytes) for offset, nbytes in self._places
        ]
        places = [InFile(self._fd, offset, self._end, os.getpid()) for offset, _ in self._places]
        return [(each.untyped_storage(), place) for each, place in zip(flat, places, strict=True)]

    def close(self) -> None:
        """Close the file; what was mapped stays."""
        os.close(self._fd)
