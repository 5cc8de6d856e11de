"""End a rank when its kernel has died, when it is stopped or hangs, and after its last task. Runs in ranks.

`DeathWatch` ends the rank's session when the kernel is gone, `SaveGrace` gives a rank that saves itself time for a last
checkpoint before, and `CutWatch` ends a wait in the device that would never end. `ExitFunctions` runs last, in the
ranks of notebooks: it ends the rank's own exit functions, threads and children, and nothing inherited.
`end_as_the_interpreter` ends those of `nbaccel launch`. `OwnHoldings` says whether it may run before all have reported.

Reasons: docs/design/starting-ranks.md
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbaccel.base.aborting import (
    Settling,
    abort_device_groups,
    can_renew,
    forget_left_exchange,
    is_aborted,
    renew,
    tore_step,
    uses_device,
)
from nbaccel.base.events import Event
from nbaccel.base.gpu_driver import has_gpu_driver
from nbaccel.launching.ipc.control import SAVE_GRACE_S, ControlPage
from nbaccel.launching.ipc.rank_part import RankPart, RankTask
from nbaccel.launching.ipc.reaper import kill_session
from nbaccel.launching.rank.inherited import LOST_THREADS
from nbaccel.launching.rank.process_setup import StacksOnRequest

__all__ = [
    "SPOILT",
    "CutWatch",
    "DeathWatch",
    "ExitFunctions",
    "OwnHoldings",
    "SaveGrace",
    "end_as_the_interpreter",
]

_EVERY_SIGNAL = signal.valid_signals()
"""Made here, in the kernel: each number without a name raises an error in Python's own code, and copies pages."""

_LASTS_MS = 250
_DYING_MS = 1000
"""Milliseconds to wait for the pidfd: a killed process closes its sockets before its pidfd reports its end."""


# https://man.archlinux.org/man/core/man-pages/PR_SET_PDEATHSIG.2const.en, "Caveats": the parent is a thread.
class DeathWatch:
    """Kills this process, its session and its descendants when the kernel has died or released this rank.

    The watch is a thread of every rank, and waits on the kernel's pidfd. A pipe would not be enough: other children of
    the kernel can hold its other end open, so that end-of-file never comes. The parent-death signal would not be enough
    either: it fires when the forking *thread* ends, and it does not reach the rank's own children. The thread also
    answers the kernel's questions where the rank is.

    Args:
        kernel_pidfd: The kernel's.
        channel_fd: The rank's end of its channel; the kernel keeps the other end open as long as it needs the rank.
        stacks: What answers the questions.

    Attributes:
        when_kernel_died: Called by the thread before that, if the kernel is dead; it returns when the rank may be
            killed.
        when_it_lasts: Called by the thread once, when it has watched for a quarter of a second.
    """

    def __init__(self, kernel_pidfd: int, channel_fd: int, stacks: StacksOnRequest | None = None) -> None:
        self.when_kernel_died: Callable[[], None] = _nothing
        self.when_it_lasts: Callable[[], None] = _nothing
        self._is_at_rest = False
        self._kernel_pidfd = kernel_pidfd
        self._channel_fd = channel_fd
        self._stacks = stacks

    def start(self) -> None:
        self._channel_fd = os.dup(self._channel_fd)  # the number may be closed and used again
        _thread.start_new_thread(self._run, ())  # a `Thread` copies some 50 pages, and waits until it runs

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Mark the rank as idle, with nothing to save: it ends at once if the kernel dies."""
        self._is_at_rest = True
        try:
            yield
        finally:
            self._is_at_rest = False

    def _run(self) -> None:
        kernel = select.poll()
        kernel.register(self._kernel_pidfd, select.POLLIN)
        events = select.poll()
        events.register(self._kernel_pidfd, select.POLLIN)
        events.register(self._channel_fd, 0)  # hang-up is always reported
        # A signal that the program blocks in its own threads must not be delivered to this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, _EVERY_SIGNAL)
        stacks, asked = self._stacks, None if self._stacks is None else self._stacks.questions
        if asked is not None:
            events.register(asked, select.POLLIN)
        limit_ms: int | None = _LASTS_MS
        while (ready := {fd for fd, _ in events.poll(limit_ms)}) <= {asked}:
            if not ready:
                limit_ms = None
                self.when_it_lasts()
            elif stacks is not None:
                stacks.answer()
        act = _nothing if self._is_at_rest else self.when_kernel_died
        if kernel.poll(_DYING_MS if act is not _nothing else 0):
            act()
        me = os.getpid()
        kill_session(me, spare=me)
        os.kill(me, signal.SIGKILL)


def _nothing() -> None:
    """Do nothing: a rank that does not save itself has nothing to do."""


class SaveGrace:
    """Learns that this rank saves itself (`SavesItself`), and ensures its last checkpoint from then on.

    Sessions end by SIGTERM to the kernel, to the ranks or to all of them, or by the kernel's death. In each case the
    run is stopped as the user would stop it: all ranks leave before the same step, where they save. Without a kernel
    rank 0 answers the handshake of the control page. Ranks that save nothing die at once, as always.
    """

    def __init__(self, page: ControlPage, rank: int, watch: DeathWatch) -> None:
        self._page = page
        self._rank = rank
        self._watch = watch

    def __call__(self, event: Event) -> None:
        self._page.saves_itself = True
        self._watch.when_kernel_died = self._outlive_kernel
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """Ask the kernel, at its next tick, to stop the run.

        A kernel that wants more than a stop sends SIGKILL next.
        """
        self._page.stop_wanted = True

    def _outlive_kernel(self) -> None:
        """Let the rank save after the kernel has died.

        Nothing reads the rank's output any more, so it goes to /dev/null, or printing would be an error. The rank ends
        itself, or is ended after the grace time.
        """
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        os.close(nowhere)
        if self._rank == 0:
            self._page.stop()
        time.sleep(SAVE_GRACE_S)


_POLL_S = 0.1
_HUNG_S = 4.0
"""Seconds that a device may take for its work before the rank counts it as hung, if a peer has failed."""

_HUNG_AT_STOP_S = 8.0
"""The same if no peer has failed."""

_FREE_S = 10.0

_FAILED_S = 10.0
"""Seconds that a failed rank 0 waits for its device before it reports.

Its values are whole if the peers still come. Nothing ends this wait earlier if all ranks wait for each other.
"""

_FAILED_PEER_S = 2.0
"""The same for the other ranks, whose values are less important."""

_ALONE_S = 60.0
"""Seconds that a finished rank waits for its device after all its peers have finished: no rank joins a sum any more."""

SPOILT = "this rank was woken in an exchange to which a peer did not come, and may hold parts of a sum"


class CutWatch(RankPart):
    """Ends a wait of this rank in its device, when the kernel says that it would never end.

    It reads the flags on the page, and keeps the state of this rank's device since. A rank that waits in its device for
    one that has failed does not react to an interrupt, and the end of that rank would not wake it either. So the kernel
    sets a flag on the control page, and a thread here aborts the rank's groups. All persistent ranks do so at about the
    same time, as NCCL requires, and form the groups anew. A rank that ends with its task does so only if its device
    does not finish by itself: its peers end too, and its results are to come back. At a stop, when no rank has failed,
    another flag is used, and no rank aborts if its device is just slow. After an abort a rank may hold parts of a sum;
    it reports whether that is possible.
    """

    def __init__(self, page: ControlPage, rank: int) -> None:
        self._page = page
        self._rank = rank
        self._is_whole = False
        self._is_torn = False
        self._stays = False
        self._has_gpu_driver = has_gpu_driver()
        self.is_readable = True  # false while the rank's device still waits
        self._thread: threading.Thread | None = None

    def begin(self, running: RankTask) -> None:
        """Begin a task that an abort may cut short; an abort that is due already finds no exchange to cut.

        Groups that were aborted are formed anew. The kernel has compared how many collectives each rank has entered:
        nobody waits for the rest of one. If there is no device to wait for, no thread is started.
        """
        forget_left_exchange()
        if running.renewal is not None:
            renew(*running.renewal)
        self._stays = running.task.home is not None
        has_device = uses_device()
        if self._thread is None and (has_device or self._has_gpu_driver):
            self._thread = threading.Thread(target=self._run, name=_CUT, daemon=True)
            self._thread.start()
        if has_device:
            self._say_that_it_hears()
        is_cut = self._page.is_cut or is_aborted()
        self._is_whole = self._is_whole and is_cut
        self._is_torn = self._is_torn and is_cut

    def look(self, has_failed: bool) -> dict[str, Any] | None:
        """Return the report to the kernel after a task; None without a group on a device.

        It is called before anything is read, because a read would wait in the device, without reacting. This wait ends
        when the device is done or was aborted. The kernel asks for an abort when the run is being ended; it does not
        know yet of a rank that has just failed, so such a rank ends its wait itself.
        """
        if not uses_device():
            return None
        was_aborted = is_aborted()
        settling = Settling()
        is_done = self._is_done(settling, has_failed)
        if not was_aborted:
            # The work of the device is whole if it finishes: an exchange that is cut later had not begun.
            self._is_whole = is_done
            if not is_done and not settling.ends_within(0):
                abort_device_groups(0)
        self.is_readable = settling.ends_within(_FREE_S)
        return {"is_cut": is_aborted(), "is_sound": self._is_whole and not self._is_torn, "obstacle": _obstacle()}

    @property
    def is_spoilt(self) -> bool:
        """Return whether the values of this rank may hold parts of a sum."""
        return is_aborted() and not self._is_whole

    def stop(self, error: BaseException) -> None:
        """Record that the task ends by `error`; if it left an optimizer's step, this rank's values cannot be shared."""
        self._is_torn = self._is_torn or tore_step(error)

    def _run(self) -> None:
        me = os.getpid()
        while os.getpid() == me:
            time.sleep(_POLL_S)
            self._say_that_it_hears()  # a group may be formed in the middle of a task
            if not is_aborted() and self._is_due():
                abort_device_groups()

    def _is_due(self) -> bool:
        if self._page.is_cut:
            return self._stays or _is_hung(_HUNG_S)
        return self._page.frees_hung and _is_hung(_HUNG_AT_STOP_S)

    def _is_done(self, settling: Settling, has_failed: bool) -> bool:
        """Return whether this rank's device finishes its work, waiting as long as that is possible."""
        if has_failed:
            return settling.wait(_FAILED_S if self._rank == 0 else _FAILED_PEER_S)
        alone_s = 0
        while alone_s < _ALONE_S:
            if settling.wait(1):
                return True
            if settling.ends_within(0) or is_aborted():
                return False
            alone_s = alone_s + 1 if self._are_peers_through() else 0
        return False

    def _are_peers_through(self) -> bool:
        peers = [rank for rank in range(self._page.world_size) if rank != self._rank]
        return bool(peers) and all(map(self._page.has_finished, peers))

    def _say_that_it_hears(self) -> None:
        """Mark on the page that the rank reacts to an abort, so that the kernel gives it time for one."""
        if not self._page.hears_cuts(self._rank) and uses_device():
            self._page.hear_cuts(self._rank)


def _is_hung(limit_s: float) -> bool:
    """Return whether this rank's device has not finished its work after `limit_s`."""
    if not uses_device():
        return False
    settling = Settling()
    return not settling.wait(limit_s) and not settling.ends_within(0)


def _obstacle() -> str:
    """Return why the groups of this rank cannot be formed anew; empty if they can."""
    if not can_renew():
        return "nothing of ours formed their groups"
    own = len(sys.modules["torch.distributed"].distributed_c10d._world.pg_map) - 1
    return f"{own} process group(s) of the program's own (new_group, a device mesh) are lost" if own > 0 else ""


_CUT = "nbaccel-cut"
_WATCHES = (_CUT, LOST_THREADS)
"""Threads that every rank may have, and that do nothing for another one."""


class OwnHoldings:
    """Finds out whether a rank's program has left something that ends with the process, and that others may still use.

    Descriptors (connections, shared memory, locks of files), threads, child processes and exit functions are that. A
    rank without any ends as soon as it has reported: the system takes milliseconds to take its memory apart, and does
    so while other ranks work.
    """

    def __init__(self) -> None:
        self._before: tuple[list[tuple[int, int, int]], int | None] | None = None

    def begin(self) -> None:
        """Record what the rank has before its first task."""
        self._before = _descriptors(), _exit_functions()

    def are_empty(self) -> bool:
        """Return whether nothing has been added that is there still."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            is_alone = {each.name for each in threading.enumerate()} <= {threading.main_thread().name, *_WATCHES}
            now = _descriptors(), _exit_functions()
            return is_alone and now[1] is not None and self._before == now
        return False


def _descriptors() -> list[tuple[int, int, int]]:
    """Return the open descriptors of this process, each with the device and the number of what it leads to."""
    found = []
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the listing itself
                status = os.fstat(number)
                found.append((number, status.st_dev, status.st_ino))
    return found


def _exit_functions() -> int | None:
    """Return how many there are; None where Python does not say."""
    count = getattr(atexit, "_ncallbacks", None)
    return None if count is None else count()


_EXIT_S = 10.0


class ExitFunctions:
    """Ends a rank: its own atexit handlers, threads and children get 10 s; then the process ends in any case.

    It is installed before any user code. `atexit` runs the newest function first and has no list of its functions, and
    clearing it would release, in this process, the objects that the notebook's functions hold. So a function is
    registered that ends the process when its turn comes, before those of the notebook.
    """

    def __init__(self) -> None:
        self._code = 0

    def install(self) -> None:
        atexit.register(self._end)
        atexit.register(logging.shutdown)

    def __call__(self, status: str) -> int:
        """End the process.

        Args:
            status: That of the rank's last task. Return the exit code, if other code has removed the registered
                function.
        """
        self._code = 0 if status in ("ok", "stopped") else 1
        _thread.start_new_thread(self._cut, ())  # as the death watch
        if self._code:
            # Handlers that ask how the process ended (wandb does) look here.
            sys.last_type, sys.last_value = RuntimeError, RuntimeError("the rank failed")
        end_as_the_interpreter()
        return self._code

    def _cut(self) -> None:
        time.sleep(_EXIT_S)
        with contextlib.suppress(BaseException):
            self._name_what_is_cut()
        os._exit(self._code)

    def _name_what_is_cut(self) -> None:
        """Say which threads are at work still: what they write is not whole."""
        me = threading.current_thread()
        left = [each for each in threading.enumerate() if each not in (me, threading.main_thread())]
        names = [each.name for each in left if not each.daemon or each.name.startswith("QueueFeederThread")]
        if names:
            said = ["a queue" if name.startswith("QueueFeederThread") else f"thread {name}" for name in names]
            line = (
                f"nbaccel: a rank was ended {_EXIT_S:.0f} s after its cell, at work still: {', '.join(said)}. What it "
                "had not written is lost: join threads in the cell, and read a queue while it is filled\n"
            )
            os.write(2, line.encode())

    def _end(self) -> None:
        multiprocessing_util = sys.modules.get("multiprocessing.util")
        if multiprocessing_util is not None:  # its handler is among those of the notebook
            with contextlib.suppress(BaseException):
                multiprocessing_util._exit_function()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(self._code)


def end_as_the_interpreter() -> None:
    """Join the threads that are no daemons, run the `atexit` handlers, and flush the output."""
    for last in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            last()
