"""Verdict: makes the one error that a failed run raises in the kernel. Runs in the kernel.

The first rank that fails by the kernel's clock is the cause; a lost connection is a consequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nbaccel.errors import RankDied, RanksFailed
from nbaccel.launch.advice import advice
from nbaccel.launch.group import Ended
from nbaccel.launch.hostmemory import HostMemory
from nbaccel.launch.member import Report
from nbaccel.launch.report import Failure, Naming, signal_name
from nbaccel.launch.spec import Task
from nbaccel.launch.wire.parcel import unpack_what_can_be_rebuilt

__all__ = ["failed_alike", "ranks_in_words", "verdict"]


def verdict(
    ended: Ended, task: Task, started_clean: bool, host: HostMemory, cell_name: Naming, memory_report: str = ""
) -> BaseException | None:
    """Return the error of the run, or None if no rank failed.

    started_clean: the ranks came from the zygote and know only the names that were sent to them.
    memory_report: the text to add if memory was the cause.
    """
    rank = ended.first_failed
    if rank is None or ended.is_interrupted or ended.is_timed_out:
        return None
    if ended.hang is not None:
        text = str(ended.hang)
        if not ended.hang.is_certain:
            text += "\nThe run was ended by its hang timeout. Every rank must come to the same calls."
        return RanksFailed(text, rank, len(ended.reports))
    report = ended.reports[rank]
    peers = _peers(ended, rank)
    world_size = len(ended.reports)
    if report is None:
        return RankDied(
            f"rank {rank} of {world_size} {_death(ended.exit_codes[rank], host)}{peers and '; ' + peers}. "
            f"{_what_is_left(ended)} {memory_report}".rstrip(),
            rank,
            world_size,
            ended.exit_codes[rank],
        )
    if report.status == "exited":
        code = "" if report.exit_code is None else repr(report.exit_code)
        return RanksFailed(
            f"rank {rank} of {world_size} called sys.exit({code}) or exit(), which ends "
            f"{'the cell and not the ranks' if ended.stays else 'the ranks and not the notebook'}"
            f"{peers and '; ' + peers}. To end a cell early, leave the loop or raise an error of your own.",
            rank,
            world_size,
        )
    error = _travelled(report, task)
    hint = (_missing_name(report, task) if started_clean else "") or memory_report
    hint = hint or advice(report.links, host, is_fork=not started_clean)
    return Failure(rank, world_size, report.links, error, peers, failed_alike(ended)).exception(cell_name, hint)


def _what_is_left(ended: Ended) -> str:
    if ended.stays:
        return "Its variables are gone, those of ranks that live are not."
    return "Variables in the ranks are gone; the next launch starts fresh ones."


def _travelled(report: Report, task: Task) -> BaseException | None:
    """Return the user's exception object, if it could be pickled and can be unpickled here."""
    try:
        values, _ = unpack_what_can_be_rebuilt(
            report.parcel_fd, namespace=task.namespace, anchored=task.anchored, placed=task.placed
        )
        error = values.get("error")
        str(error)  # its text is needed to show it, and must not raise a second error then
    except Exception:  # a user's class may do anything when it is rebuilt; the report in text is enough
        return None
    return error if isinstance(error, BaseException) else None


def _missing_name(report: Report, task: Task) -> str:
    """Return a hint for a NameError: a pickled exception loses its `name`, but its text has it."""
    last = report.links[-1]
    found = re.search(r"name '(\w+)' is not defined", last.headline[-1] if last.headline else "")
    if last.type_name != "NameError" or found is None or found[1] not in (task.namespace or {}):
        return ""
    if task.home is not None:
        return (
            f"The notebook has `{found[1]}`, the ranks do not: %accelerate push {found[1]} sends it, or says why not."
        )
    return (
        f"The notebook has `{found[1]}`, but the cell does not mention it, so it was not sent to the ranks, which "
        f"here start from a clean process. Send it with --in {found[1]}"
    )


def _death(exit_code: int, host: HostMemory) -> str:
    if exit_code >= 0:
        return (
            f"ended with exit code {exit_code} before its work was done (os._exit, or a library that ends the process)"
        )
    name = signal_name(-exit_code)
    text = f"was killed by {name} (signal {-exit_code})"
    if name != "SIGKILL":
        return text
    return f"{text}: {host.explain_kill()}"


def failed_alike(ended: Ended) -> bool:
    """Return whether all of several ranks failed with the same error, so that none of them is the one to name."""
    cause = ended.first_failed
    return cause is not None and 1 < len(ended.reports) == 1 + len(_alike(ended, cause))


def _alike(ended: Ended, cause: int) -> list[int]:
    """Return the other ranks that failed with the same error as `cause`."""
    headline = _headline(ended.reports[cause])
    return [rank for rank in _others(ended, cause) if headline and _headline(ended.reports[rank]) == headline]


def _peers(ended: Ended, cause: int) -> str:
    """Return one clause on the other ranks: which failed too, which had to be stopped; empty if all failed alike."""
    if failed_alike(ended):
        return ""
    same = _alike(ended, cause)
    stopped = [rank for rank in _others(ended, cause) if rank not in same and not _is_done(ended.reports[rank])]
    parts = []
    if same:
        parts.append(f"the same on {ranks_in_words(same)}")
    if stopped:
        parts.append(f"{ranks_in_words(stopped)} had to be stopped")
    return "; ".join(parts)


def _others(ended: Ended, cause: int) -> Sequence[int]:
    return [rank for rank in range(len(ended.reports)) if rank != cause]


def _headline(report: Report | None) -> Any:
    return None if report is None or not report.links else report.links[-1].headline


def _is_done(report: Report | None) -> bool:
    return report is not None and report.status == "ok"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 1", "ranks 1-3", "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
