"""Threads of a notebook do not live in forked ranks: what needs one is opened again, or ends in a sentence."""

from __future__ import annotations

import re

import pytest

from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SHORT = "from nbaccel.launching.rank import inherited; inherited._EVERY_S, inherited._VAIN_S = 0.5, {vain_s}"
"""What forked ranks inherit: a wait counts as in vain after this time, not after eight seconds."""

AS_IT_IS = "inherited._EVERY_S, inherited._VAIN_S = 2.0, 8.0"

SERVED = """
import queue, threading

class Prefetcher:
    '''Its thread answers each request.'''
    def __init__(self):
        self.requests, self.answers = queue.Queue(), queue.Queue()
        threading.Thread(target=self.serve, name="prefetch", daemon=True).start()
    def serve(self):
        while (request := self.requests.get()) is not None: self.answers.put(2 * request)
    def double(self, number):
        self.requests.put(number)
        return self.answers.get()

prefetcher = Prefetcher(); assert prefetcher.double(2) == 4
ready = threading.Event()
lock = threading.Lock()
keeper = threading.Thread(target=lambda: lock.acquire() and ready.wait(), name="keeper", daemon=True); keeper.start()
"""

WAITS = {
    "prefetcher.double(1)": r"prefetcher \(__main__\.Prefetcher\) at Cell In\[\d+\], line 2: prefetcher\.double\(1\)",
    "ready.wait()": r"ready \(threading\.Event\) at Cell In\[\d+\], line 2",
    "with lock:\n    pass": r"lock \(_thread\.lock\) at Cell In\[\d+\], line 2: with lock:",
}


def test_a_wait_for_a_thread_of_the_notebook_ends_with_the_objects_name(kernel: RealKernel) -> None:
    kernel.do(SERVED)
    kernel.do(SHORT.format(vain_s=1.5))
    try:
        for code, sentence in WAITS.items():
            cell = kernel.run(accelerate(code, "fork"))
            error = cell.failed("NotInRanks")
            assert re.search(sentence, error.text), error.text
            if "prefetcher" in code:
                assert "prefetcher works by a thread of the notebook (prefetch), which ranks lack" in cell.text
            assert "Threads of the notebook: " in error.text
            assert "prefetch" in error.text
            assert cell.seconds < 8
        assert kernel.value("prefetcher.double(3)") == 6
    finally:
        kernel.do(f"prefetcher.requests.put(None); ready.set(); keeper.join(); {AS_IT_IS}")


def test_waits_with_a_limit_again_and_again_are_named_in_a_line_and_go_on(kernel: RealKernel) -> None:
    """They may end otherwise: here by the time limit of the run."""
    kernel.do(SERVED)
    kernel.do(SHORT.format(vain_s=0.8))
    try:
        cell = kernel.run(accelerate("while not ready.wait(0.2):\n    pass", "fork", n=1, flags="-t 6"))
        assert "nbaccel: rank 0 waits for a thread of the notebook" in cell.text, cell.text
        assert "ready (threading.Event)" in cell.text
        assert "NotInRanks" not in cell.text
        assert cell.text.count("waits for a thread of the notebook") == 1
    finally:
        kernel.do(f"prefetcher.requests.put(None); ready.set(); keeper.join(); {AS_IT_IS}")


@pytest.mark.full
def test_a_wait_in_vain_ends_within_a_quarter_of_a_minute(kernel: RealKernel) -> None:
    kernel.do(SERVED)
    try:
        cell = kernel.run(accelerate("ready.wait()", "fork"))
        cell.failed("NotInRanks")
        assert cell.seconds < 15
    finally:
        kernel.do("prefetcher.requests.put(None); ready.set(); keeper.join()")


def test_a_wait_that_a_thread_of_the_rank_will_end_is_left_alone(kernel: RealKernel) -> None:
    """Also one for what a thread of the notebook might have ended."""
    kernel.do(SERVED)
    kernel.do(SHORT.format(vain_s=1.5))
    try:
        cell = kernel.do(
            accelerate(
                """
                import threading
                threading.Timer(4, prefetcher.answers.put, ["from the rank"]).start()
                print(prefetcher.double(1))
                """,
                "fork",
                n=1,
            )
        )
        assert cell.printed == "from the rank\n"
    finally:
        kernel.do(f"prefetcher.requests.put(None); ready.set(); keeper.join(); {AS_IT_IS}")


def test_a_tensorboard_writer_goes_on_in_rank_0_alone(kernel: RealKernel, start: str) -> None:
    kernel.do(
        f"""
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter("events-{start}"); writer.add_scalar("loss", 0.0, 0)
        """
    )
    kernel.do(
        accelerate(
            """
            for step in range(1, 100): writer.add_scalar("loss", step, step)
            writer.flush()
            writer.close()
            writer.add_scalar("after", 1, 100)
            writer.close()
            """,
            start,
        )
    )
    kernel.do(
        f"""
        writer.add_scalar("loss", 100, 100); writer.close()
        import glob
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        files = glob.glob("events-{start}/*")
        events = EventAccumulator("events-{start}"); _ = events.Reload()
        steps = sorted(event.step for event in events.Scalars("loss"))
        after = len(events.Scalars("after"))
        """
    )
    assert kernel.value("steps") == [*range(101)]
    assert kernel.value("after") == 1
    assert kernel.value("len(files)") == 3  # the notebook's, and rank 0's two
