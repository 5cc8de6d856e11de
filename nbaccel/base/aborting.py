"""Aborting: ends a rank's wait inside its device, and keeps incomplete results from being used. Runs in ranks.

A kernel of NCCL's that waits for a peer does not react to an interrupt, and does not notice that the peer has gone.
Only aborting its communicator ends the wait. Work of an aborted communicator then counts as complete, without an error,
though its buffers hold parts of sums (torch's ``WorkNCCL::isCompleted``); and work that was queued after it, for
example an optimizer's step, runs on these. So the abort is one fact of the process, set before anything is aborted:
while it is set, no step, save or read takes place. It ends when the groups are formed anew.

gloo has no such problem: its work fails with an error. Groups of the CPU are never touched here.

Another fact of the process, for all backends: an exception has ended an exchange of this rank half-way, and its program
may have caught it (`leave_exchange`). Exchanges have no names, so the next one would meet the rest of that one in the
other ranks: they would wait for ever, mix their bytes, or gloo would end the process. While it holds, this rank enters
no exchange; it ends when the groups are formed anew, and with the task.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from nbaccel.base.events import ExchangeLeft, emit
from nbaccel.errors import CollectiveMismatch, PeerFailed

__all__ = [
    "DEVICE_BACKENDS",
    "DEVICE_ERRORS",
    "Settling",
    "abort_device_groups",
    "await_aborts",
    "can_renew",
    "device_parts",
    "end_device_groups",
    "forget_abort",
    "forget_left_exchange",
    "is_aborted",
    "leave_device_errors_to_the_program",
    "leave_exchange",
    "on_renewal",
    "refuse_if_aborted",
    "refuse_if_exchange_was_left",
    "renew",
    "settle",
    "tore_step",
    "uses_device",
]

DEVICE_BACKENDS = {"nccl", "xccl"}
"""Backends whose work runs on a device and ends by an abort only."""

_ABORT_S = 10.0
"""Seconds that an abort may take; NCCL's returns only when the peers of the same machine have aborted too."""

_ANSWER_S = 0.5
"""Seconds beyond its limit that an answer from a store may take."""

_POLL_S = 0.005


class _Abort:
    """The abort of this process, and the threads that carry it out."""

    def __init__(self) -> None:
        self.is_set = False
        self._world: Any = None  # the default group that was aborted
        self._parts: list[tuple[Any, threading.Thread]] = []
        self._hook: Any = None
        self.renewal: Callable[[int, int], None] | None = None
        self._lock = threading.RLock()  # an interrupt may come in here, and its handler may abort too

    @property
    def holds(self) -> bool:
        """Return whether the abort is in effect, and the program has not formed its groups anew by itself."""
        if self.is_set and (world := _world()) is not None and world is not self._world:
            self.forget()
        return self.is_set

    def begin(self, spoils: bool) -> None:
        """Set the fact, then begin to abort all parts that are not being aborted yet."""
        with self._lock:
            if spoils:
                self.is_set, self._world = True, _world()
                self._hook = self._hook or _hold_steps()
            for part in device_parts():
                if not any(part is known for known, _ in self._parts):
                    # One thread for each: a communicator's abort waits for its kernels, which may be queued behind
                    # those of another one (pytorch #119797).
                    thread = threading.Thread(target=_abort, args=(part,), name="nbaccel-abort", daemon=True)
                    self._parts.append((part, thread))
                    thread.start()

    def wait(self, limit_s: float) -> bool:
        """Return whether all aborts have ended within `limit_s`."""
        deadline = time.monotonic() + limit_s
        for _, thread in list(self._parts):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for _, thread in self._parts)

    def forget(self) -> None:
        with self._lock:
            self.is_set, self._world = False, None
            self._parts.clear()
            if self._hook is not None:
                self._hook.remove()
                self._hook = None


_abort_of_this_process = _Abort()


def is_aborted() -> bool:
    """Return whether this rank's device groups were aborted, and not formed anew since."""
    return _abort_of_this_process.holds


# Peers on the same machine may see no error of it: https://github.com/NVIDIA/nccl/issues/279.
def abort_device_groups(limit_s: float = _ABORT_S, *, spoils: bool = True) -> bool:
    """End waits of this rank in its device, in all of its process groups; from any thread, any number of times.

    It never raises. Return whether all aborts have returned within `limit_s`; the others continue in their own threads.
    Nothing happens without a group of `DEVICE_BACKENDS`.

    Args:
        spoils: False if nothing was under way, so that all values of this rank are whole.
    """
    if not uses_device():
        return True
    _abort_of_this_process.begin(spoils)
    return _abort_of_this_process.wait(limit_s)


def await_aborts(limit_s: float) -> bool:
    """Return whether all aborts that were begun have returned within `limit_s`. It begins none."""
    return _abort_of_this_process.wait(limit_s)


def forget_abort() -> None:
    """Record that the groups which were aborted are no longer in use."""
    _abort_of_this_process.forget()


def on_renewal(renewal: Callable[[int, int], None]) -> None:
    """Make `renew` call ``renewal(source, number)``. Called by the code that knows what was trained in this process."""
    _abort_of_this_process.renewal = renewal


def can_renew() -> bool:
    """Return whether this process knows how to form its groups anew."""
    return _abort_of_this_process.renewal is not None


def renew(source: int, number: int) -> None:
    """Form the default group of this process anew, after it was aborted. Collective.

    Args:
        source: The rank whose state counts.
        number: A number that no earlier renewal had, equal on all ranks.
    """
    assert _abort_of_this_process.renewal is not None, "renew() without on_renewal()"
    _abort_of_this_process.renewal(source, number)


DEVICE_ERRORS = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Variable that lets the program raise a device error where it waits for the device.

torch's watchdog asks the device ten times a second, so it often meets the error first, and then ends the process by
SIGABRT before the line of the error is known. With 0 only its thread ends. The thread that watches it ends a process
that still hangs some ten minutes later. Read by torch 2.6 to 2.15; a value that is already set is kept.
"""


def leave_device_errors_to_the_program() -> None:
    """Set `DEVICE_ERRORS` in this process. Called before a group of NCCL's is formed."""
    for name, value in DEVICE_ERRORS.items():
        os.environ.setdefault(name, value)


# NCCL reports an aborted collective as done: https://github.com/meta-pytorch/torchft/pull/147, and torch asks
# only communicators that are not aborted for errors: https://github.com/pytorch/pytorch/pull/124466.
def refuse_if_aborted(what: str) -> None:
    """Raise PeerFailed if this rank's groups were aborted.

    Args:
        what: The action that would use incomplete values.
    """
    if _abort_of_this_process.holds:
        raise PeerFailed(
            f"this rank's exchange with its peers was cut short, since one failed, ran out of memory or was "
            f"interrupted: {what} would use sums that are not complete. The error of that rank says what happened."
        )


class _LeftExchange:
    """The first exchange that this rank has left half-way.

    Attributes:
        call: Empty if there is none.
        why: The exception.
    """

    def __init__(self) -> None:
        self.call = self.why = ""


_left_exchange = _LeftExchange()


def leave_exchange(call: str, error: BaseException) -> None:
    """Record that `error` has ended this rank's part in an exchange with its peers, who may wait for the rest of it.

    The peers are told by an `ExchangeLeft`, if anyone listens to it.

    Args:
        call: The exchange in words.
    """
    if not _left_exchange.call:
        _left_exchange.call = call
        _left_exchange.why = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        emit(ExchangeLeft(call))


def forget_left_exchange() -> None:
    """Record that no peer waits for the rest of it: the groups are formed anew, or the kernel has found all in step."""
    _left_exchange.call = ""


def refuse_if_exchange_was_left(call: str) -> None:
    """Raise CollectiveMismatch if this rank has left an exchange half-way.

    Args:
        call: The one that it is about to enter.
    """
    if _left_exchange.call:
        raise CollectiveMismatch(
            f"this rank goes on after an exception ({_left_exchange.why}) has ended its {_left_exchange.call} "
            f"half-way, while the other ranks wait for the rest of it: they are out of step, and nothing is exchanged "
            f"any more, as in {call}. Let the exception end the cell, or end the loop before the same step in all "
            "ranks: by %%accelerate -t SECONDS, or by accelerator.set_trigger() and check_trigger(). A function under "
            "find_executable_batch_size begins anew in all ranks."
        )


def tore_step(error: BaseException) -> bool:
    """Return whether `error`, or one before it, left an optimizer's step, whose progress is then unknown."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        if type(link).__name__ == "StepCorrupted" or _left_step(link.__traceback__):
            return True
        seen.append(link)
        link = link.__cause__ or link.__context__
    return False


def _left_step(trace: TracebackType | None) -> bool:
    """Return whether the traceback left an optimizer's own step, by torch's frames, unless the hook refused it."""
    is_in_step = False
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        is_in_step |= module == "torch.optim.optimizer" and "profile_hook_step" in code.co_qualname
        if code is _refuse_step.__code__:
            return False
        trace = trace.tb_next
    return is_in_step


def uses_device() -> bool:
    """Return whether any process group of this process works on a device."""
    return any(True for _ in _places())


def device_parts() -> list[Any]:
    """Return the backends of all process groups on a device; of a mixed one, ``cpu:gloo,cuda:nccl``, that part."""
    return list({id(part): part for part in map(_part, _places())}.values())


def settle(limit_s: float) -> bool:
    """Return whether this rank's device has finished all its work in time, and nothing of it was aborted.

    Without a group on a device there is nothing to wait for. The wait ends at `limit_s`, or by an abort.
    """
    return not uses_device() or Settling().wait(limit_s)


class Settling:
    """Waits for the rank's device, in a thread: CUDA's wait does not react to an interrupt and has no limit."""

    def __init__(self) -> None:
        self._synchronize = _synchronizer()
        self._is_settled = False
        self._thread = threading.Thread(target=self._run, name="nbaccel-settle", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> bool:
        """Return whether the device has finished, and nothing was aborted; by `limit_s` or an abort at the latest."""
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive() and not is_aborted() and time.monotonic() < deadline:
            self._thread.join(_POLL_S)
        return self._is_settled and not is_aborted()

    def ends_within(self, limit_s: float) -> bool:
        """Return whether the device waits for nothing any more, for any reason: an abort, or its own error."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._is_settled = self._synchronize()


def end_device_groups(limit_s: float, do_peers_come: Callable[[], bool]) -> bool:
    """End the groups on a device that have no work under way; return whether they ended, each part within `limit_s`.

    They end regularly if the peers do the same, as those of one machine must; otherwise by an abort, which spoils
    nothing. It waits for the peers first: an abort cannot overtake an end that waits for them, because torch's
    ``ProcessGroupNCCL.shutdown`` holds the locks of the group and of its communicators meanwhile.

    Args:
        do_peers_come: Returns whether they do, within `limit_s`. Called in a thread; no answer, or an error, means no.
    """
    if not _is_true(do_peers_come, limit_s + _ANSWER_S):
        return abort_device_groups(limit_s, spoils=False)
    parts = device_parts()
    threads = [threading.Thread(target=_shut, args=(part,), name="nbaccel-shut", daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread in threads):
        return True
    return abort_device_groups(limit_s, spoils=False)


def _is_true(question: Callable[[], bool], limit_s: float) -> bool:
    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError, OSError):  # a lost store: its server ended with a peer
            answers.append(question())

    thread = threading.Thread(target=ask, name="nbaccel-peers", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers == [True]


def _world() -> Any:
    """Return the present default group; None without one."""
    distributed = sys.modules.get("torch.distributed")
    return None if distributed is None or not distributed.is_available() else distributed.group.WORLD


def _places() -> Iterator[tuple[Any, str]]:
    """Yield each process group that works on a device, and the type of that device."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    configs = getattr(getattr(c10d, "_world", None), "pg_backend_config", None)  # none while torch is being imported
    if not configs or not sys.modules["torch.distributed"].is_initialized():
        return
    for group, config in list(configs.items()):
        for device in _devices_in(str(config)):
            yield group, device


def _devices_in(config: str) -> list[str]:
    """Return the devices on which a group works by one of `DEVICE_BACKENDS`.

    Args:
        config: In torch's format.

    Example:
        >>> _devices_in("cpu:gloo,cuda:nccl"), _devices_in("cpu:gloo,cuda:gloo"), _devices_in("nccl")
        (['cuda'], [], ['cuda'])
    """
    entries = [entry.rpartition(":") for entry in config.split(",")]
    return [device or "cuda" for device, _, backend in entries if backend in DEVICE_BACKENDS]


def _part(place: tuple[Any, str]) -> Any:
    group, device = place
    try:
        # Not `ProcessGroup.abort`, which is of torch 2.7 and would abort the group's part on the CPU too.
        part = group._get_backend(sys.modules["torch"].device(device))
    except (RuntimeError, AttributeError):  # a group of a backend that is a ProcessGroup itself
        return group
    return getattr(part, "wrapped_pg", part)  # TORCH_DISTRIBUTED_DEBUG=DETAIL


def _shut(part: Any) -> None:
    try:
        (getattr(part, "shutdown", None) or part._shutdown)()  # the latter by torch before 2.7
    except Exception:  # what is left of it ends with the process
        return


def _abort(part: Any) -> None:
    try:
        part.abort()
    except Exception:  # a failed abort shows in the next collective
        return


def _hold_steps() -> Any:
    """Make every optimizer of torch's refuse its step, also one that the program steps itself; `remove` ends this."""
    optim = sys.modules.get("torch.optim.optimizer")
    return None if optim is None else optim.register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    refuse_if_aborted(f"a step of {type(optimizer).__name__}")


def _is_used(torch: Any, module: Any, index: int) -> bool:
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is not None and module is torch.cuda:
        return bool(has_context(index))
    return bool(module.memory_reserved(index))


def _synchronizer() -> Callable[[], bool]:
    """Return a function that waits for all devices that this rank uses; on others CUDA would take memory.

    A model may be on several devices. The devices of CUDA in use are known by their contexts. The allocator knows them
    too, but its answer waits, with Python's lock, for a thread that looks for memory behind the work that is to be
    ended here.
    """
    torch = sys.modules["torch"]
    modules = [module for name in ("cuda", "xpu") if (module := getattr(torch, name, None)) is not None]
    devices = [
        (module, index)
        for module in modules
        if module.is_initialized()
        for index in range(module.device_count())
        if _is_used(torch, module, index)
    ]

    def synchronize() -> bool:
        try:
            for module, device in devices:
                module.synchronize(device)
        except RuntimeError:  # an error of the device: what it was computing is lost
            return False
        return True

    return synchronize
