"""Ranks that stay from one task to the next, and their position in the sequence of collectives. Runs in the kernel.

`persistent_start` makes `PersistentWorkers`. Between two tasks they keep their memory and wait for an order of the
kernel, which costs no time; they die with the kernel as all ranks do. Their positions (`CollectivePosition`) are
compared after every task. If they are out of step, or one of them is gone, they run no further cell, but the names of
living ranks can still be read.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from nbaccel.launching.attempts import LaunchAttempt, OomKillWatch, RunRecorder
from nbaccel.launching.diagnosis import diagnose
from nbaccel.launching.ipc.reports import signal_name
from nbaccel.launching.ipc.shared_namespace import SharedNamespace
from nbaccel.launching.ipc.spec import LaunchSpec, Task
from nbaccel.launching.ipc.user_code import cell_name
from nbaccel.launching.kernel_holdings import held_here
from nbaccel.launching.oom_restart import OomRestartPolicy
from nbaccel.launching.processes.alarm import endable
from nbaccel.launching.processes.handle import WorkerHandle
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers, open_log
from nbaccel.launching.processes.workers import WorkerGroup
from nbaccel.launching.run import Run, record_of

__all__ = [
    "CollectivePosition",
    "PersistentWorkers",
    "out_of_step",
]


class PersistentWorkers:
    """The persistent ranks of one start. Their owner closes them.

    Args:
        spec: The specification of their start.
        home: The kernel's record of their names.
        ended: The result of the start.
        turn: `Launcher.turn`.
        new_log: Returns the path of the next run's log.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        worker_group: WorkerGroup,
        home: SharedNamespace,
        ended: RankResults,
        *,
        turn: Callable[[str], AbstractContextManager[None]],
        new_log: Callable[[], str],
    ) -> None:
        self.spec = spec
        self.home = home
        self.since = time.time()
        self.is_open = True
        self._worker_group = worker_group
        self._turn = turn
        self._new_log = new_log
        self._names: dict[int, frozenset[str]] = {}
        self._standings: dict[int, CollectivePosition] = {}
        self._gone: dict[int, str] = {}
        self._out_of_step = ""
        self._spoilt: list[int] = []
        self._source: int | None = None
        self._renewals = 0
        self._is_at_work = False
        self._compare(ended, (), "the start")

    # --- what they do ------------------------------------------------------------------------------------------

    def run(
        self,
        task: Task,
        watching: RunObservers,
        *,
        title: str,
        excluded_ranks: Collection[int] = (),
        timeout_s: float | None = None,
        hang_timeout_s: float | None = None,
        occupied: str = "",
    ) -> tuple[Run, RankResults]:
        """Run a task in the ranks; return when all have reported, and wait again. Returns what `Launcher.run` does.

        A rank that has to be killed, since it does not react, is gone; the others stay.

        Args:
            title: The task in words.
            excluded_ranks: Ranks that take no part.  The limits are those of `RunEnd`.
            occupied: See `Launcher.turn`.

        Raises:
            LaunchRefused: A run of another thread goes on for which no caller should wait.
            CannotSend: A name cannot be sent to the ranks; they have not been asked.
            TimeoutError: `timeout_s` was over before all was packed; they have not been asked either.
        """
        alive = self.alive
        insiders = [rank for rank in alive if rank not in excluded_ranks]
        absent = [rank for rank in range(self.spec.world_size) if rank not in insiders]
        spec = replace(self.spec, task=task).ending(timeout_s=timeout_s, hang_timeout_s=hang_timeout_s)
        renewal: tuple[int, int] | None = None
        host, recorder, log_path = OomKillWatch(), RunRecorder(), self._new_log()
        with self._turn(occupied), self._at_work():
            self.home.there = frozenset.intersection(*(self._names[rank] for rank in insiders))
            with endable(timeout_s, watching.beside):
                payload = task.pack()
            try:
                if self._source is not None and not absent:  # only after packing: without a payload they are not asked
                    self._renewals += 1
                    renewal, self._source = (self._source, self._renewals), None
                with open_log(log_path) as log:
                    ended = watching.watch(
                        self._worker_group,
                        task,
                        spec.end,
                        log,
                        recorder,
                        begin=lambda fds: self._worker_group.give(task.reference, payload, absent, renewal),
                        excluded_ranks=absent,
                    )
            except BaseException:  # the group has reaped them all
                self._end()
                raise
            finally:
                os.close(payload.fd)
            self._compare(ended, absent, title)
        over = OomRestartPolicy(lambda: held_here(task.namespace)).after(LaunchAttempt(spec, ended, recorder, host))
        error = diagnose(ended, True, host, cell_name, getattr(over, "report", ""))
        return record_of(ended, spec.start, error, log_path, recorder.checkpoint), ended

    def close(self, watching: RunObservers) -> None:
        """End the ranks as at the end of a run; no process of theirs is left."""
        with self._turn(""), self._at_work():
            if not self.is_open:
                return
            try:
                self._worker_group.dismiss()
                with open_log(self._new_log()) as log:
                    watching.watch(
                        self._worker_group, self.spec.task, self.spec.end, log, begin=lambda fds: None
                    ).close()
            finally:
                self._end()

    def abandon(self) -> None:
        """End the ranks at once, without reading their output; a second call changes nothing."""
        if self.is_open:
            self._end()

    def _end(self) -> None:
        self.is_open = False
        self._worker_group.close()

    # --- what is known of them ---------------------------------------------------------------------------------

    @property
    def alive(self) -> list[int]:
        """Return the ranks whose process lives."""
        return sorted(self.pids)

    @property
    def pids(self) -> dict[int, int]:
        """Return the process of each rank that lives."""
        if not self.is_open:
            return {}
        self._look_for_deaths()
        return {member.rank: member.process.pid for member in self._worker_group.members if not member.has_ended}

    @property
    def fds(self) -> list[int]:
        """Return the descriptors that no other rank may hold."""
        return self._worker_group.fds() if self.is_open else []

    def names(self, rank: int) -> frozenset[str]:
        """Return the names that `rank` has; none if it is gone."""
        return self._names.get(rank, frozenset())

    @property
    def trouble(self) -> str:
        """Return the reason why no further cell can run in these ranks; empty if one can."""
        if self.is_open:
            self._look_for_deaths()
        of = self.spec.world_size
        gone = "; ".join(f"rank {rank} of {of} {how}" for rank, how in sorted(self._gone.items()))
        return gone or self._out_of_step

    def _compare(self, ended: RankResults, excluded_ranks: Collection[int], title: str) -> None:
        """Record the state of each rank after a task, and compare them."""
        for member in self._worker_group.members:
            report = ended.reports[member.rank]
            if member.has_ended:
                self._reap(member, f"in {title}")
            elif member.rank in excluded_ranks:
                self._standings[member.rank] = CollectivePosition(self._standings[member.rank].issued)
            elif report is not None:
                self._names[member.rank] = report.names
                self._standings[member.rank] = self._position(member.rank, report.sequence, ended, bool(excluded_ranks))
        if self._is_cut(ended):
            self._mend(ended, title)
            return
        self._worker_group.page.is_cut = False
        if (places := out_of_step(self._standings)) and not self._out_of_step:  # a later pull is not the cause
            self._out_of_step = (
                f"the ranks are out of step since {title}, and the next collective could hang ({places})"
            )

    def _is_cut(self, ended: RankResults) -> bool:
        """Return whether exchanges over a device were aborted in this task, or before it and are not restored yet."""
        cuts = [report.cut for report in ended.reports if report is not None and report.cut is not None]
        return (
            self._source is not None
            or any(cut.is_cut for cut in cuts)
            or (self._worker_group.page.is_cut and bool(cuts))
        )

    def _mend(self, ended: RankResults, title: str) -> None:
        """Decide how ranks with aborted exchanges can go on; all of them have to abort theirs."""
        cuts = {rank: report.cut for rank, report in enumerate(ended.reports) if report is not None and report.cut}
        if self._source is not None and len(cuts) < self.spec.world_size:
            return  # some took no part in this task, and their state is unchanged
        self._worker_group.page.is_cut = True
        sound = [rank for rank, cut in cuts.items() if cut.is_sound]
        reasons = [f"{cut.obstacle} in rank {rank}" for rank, cut in cuts.items() if cut.obstacle]
        if len(cuts) < self.spec.world_size:
            reasons.append("not all of them can say what they have")
        elif not sound:
            reasons.append("of no rank is it known that it is as its last whole step left it")
        self._spoilt = [rank for rank, cut in cuts.items() if not cut.is_sound]
        if reasons:
            self._out_of_step = (
                f"the exchanges between the ranks were ended in {title}, since one of them did not come while others "
                f"waited for it in their devices, and they cannot be begun anew: {'; '.join(reasons)}"
            )
        else:
            self._source = ended.first_failed if ended.first_failed in sound else sound[0]

    @property
    def news(self) -> str:
        """Return the line on what the next cell does first; empty if that is nothing."""
        if self._source is None:
            return ""
        spoilt = f"; until then pull from rank {self._source}" if self._spoilt else ""
        return f"the next cell connects them anew, and trains on from what rank {self._source} has{spoilt}"

    def _position(self, rank: int, issued: int | None, ended: RankResults, is_partial: bool) -> CollectivePosition:
        """Return the standing of a rank.

        Steps count only after a failure: in a good run a rank may have its own loop.
        """
        position = self._worker_group.page.read(rank)
        is_inside = position.in_step and ended.first_failed is not None and not is_partial
        return CollectivePosition(issued, self._worker_group.page.collectives(rank), position.step if is_inside else -1)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Mark that a run's own loop, perhaps in another thread, notices ranks that die meanwhile."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def _look_for_deaths(self) -> None:
        if self._is_at_work:
            return
        poll = select.poll()
        living = {member.process.pidfd: member for member in self._worker_group.members if not member.has_ended}
        for pidfd in living:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(0):
            member = living[pidfd]
            member.has_ended = True
            self._worker_group.reap([member])
            self._reap(member, "while it had nothing to do")

    def _reap(self, member: WorkerHandle, when: str) -> None:
        self._gone.setdefault(member.rank, f"{_end_of(member)} {when}")
        self._names.pop(member.rank, None)
        self._standings.pop(member.rank, None)


def _end_of(member: WorkerHandle) -> str:
    """Return how a rank's process ended; it has been reaped."""
    code = member.process.exit_code or 0
    if member.was_killed:
        return "did not listen and had to be ended"
    if not member.stays:
        return "had to leave, because rank 0 waited for it where nothing else would have ended its waiting,"
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class CollectivePosition:
    """The position of one rank.

    Args:
        issued: Collectives that torch has issued in the default process group (gloo counts those of DDP too); None
            without a group.
        entered: Collectives of the project that the rank has entered in its last task.
        step: The step that it has not finished; -1: none.

    Example:
        >>> str(CollectivePosition(12, 3)), str(CollectivePosition(None)), str(CollectivePosition(4, 1, 7))
        ('12 collectives', 'no process group', '4 collectives, inside step 7')
    """

    issued: int | None = None
    entered: int = 0
    step: int = -1

    def __str__(self) -> str:
        plural = "" if self.issued == 1 else "s"
        group = "no process group" if self.issued is None else f"{self.issued} collective{plural}"
        return group if self.step < 0 else f"{group}, inside step {self.step}"


def out_of_step(standings: Mapping[int, CollectivePosition]) -> str:
    """Return the position of each rank, if they differ; else an empty text.

    Collectives have no names: the next one that a rank enters meets the next one of its peers. So after one rank has
    failed or was stopped between two collectives, the ranks must not enter another one, or they hang or mix up bytes.

    Example:
        >>> out_of_step({0: CollectivePosition(4), 1: CollectivePosition(4)})
        ''
        >>> out_of_step({0: CollectivePosition(4), 1: CollectivePosition(3)})
        'rank 0: 4 collectives; rank 1: 3 collectives'
    """
    if len(set(standings.values())) < 2:
        return ""
    return "; ".join(f"rank {rank}: {position}" for rank, position in sorted(standings.items()))
