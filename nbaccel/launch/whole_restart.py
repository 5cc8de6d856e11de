"""Restart with whole batches after an error on the first parts of one. Runs in the kernel.

A loop that prepares nothing is given parts of its batches. One that counts on whole ones, as by ``view(64, -1)`` or by
labels that it has made before, fails on the first part. Nothing was trained on parts then, so the run starts again,
once, with whole batches in every rank: the same work, and right. `WholeBatches` decides, between one attempt and the
next; `Launcher` acts. Files that a rank has written would be written twice, so such a run is not started again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbaccel.launch.oom_restart import LaunchAttempt, Restart
from nbaccel.settings import WHOLE, RunSettings

__all__ = ["WholeBatches"]

_LONGEST_TEXT = 100


@dataclass(slots=True)
class WholeBatches:
    """Restart policy of one run, asked after every attempt that is not about memory.

    failed: the attempt that failed on its parts, and was followed by one with whole batches; None for none.
    """

    failed: LaunchAttempt | None = None

    def after(self, attempt: LaunchAttempt) -> Restart | None:
        """Return how the run starts again, the first time that it failed on parts; None where it does not."""
        ended, rank = attempt.ended, attempt.ended.first_failed
        if self.failed is not None or rank is None or ended.is_interrupted or ended.is_timed_out or ended.hang:
            return None
        report = ended.reports[rank]
        if report is None or not report.facts.get("fails_on_parts") or report.cause is None:
            return None
        if attempt.spec.stays or attempt.spec.no_restart or self._has_written(attempt):
            return None
        self.failed = attempt
        text = (report.cause.headline or [report.cause.type_name])[0]
        text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
        settings = RunSettings(batches=WHOLE).over(attempt.spec.settings)
        left_s = None if attempt.spec.timeout_s is None else max(0.0, attempt.spec.timeout_s - ended.seconds)
        return Restart(
            replace(attempt.spec, settings=settings, timeout_s=left_s),
            f"rank {rank} failed on its first part of a batch ({text}), as code does that counts on whole ones; "
            f"started again with whole batches in each of {attempt.spec.world_size} ranks, the same work",
        )

    def the_one_to_tell(self, last: LaunchAttempt) -> tuple[LaunchAttempt, str]:
        """Return the attempt whose error is shown, and a hint for the reader, after `last`, the last one.

        It is the first one if whole batches have failed, too; the other's results are released.
        """
        if self.failed is None:
            return last, ""
        if last.ended.first_failed is None or last.ended.is_interrupted or last.ended.is_timed_out:
            self.failed.ended.close()
            return last, ""
        last.ended.close()
        return (
            self.failed,
            "With whole batches in every rank it failed, too, so the size of the parts may not be the cause.",
        )

    @staticmethod
    def _has_written(attempt: LaunchAttempt) -> bool:
        return bool(attempt.recorder.opened or attempt.ended.open_files or attempt.ended.has_written)
