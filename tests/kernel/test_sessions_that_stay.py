"""Ranks that stay from cell to cell: what lasts in them, how they end, and that nothing is left of them."""

from __future__ import annotations

import pytest

from fixtures.kernels import Kernels
from kernel.harness import RealKernel

BEGIN = "%accelerate start -n 2 --cpu --start {}"


def begin(kernel: RealKernel, start: str) -> None:
    """Start two ranks; a test ends them by `%accelerate stop`."""
    cell = kernel.do(BEGIN.format(start))
    assert "their memory is held until %accelerate stop" in cell.stdout


def end(kernel: RealKernel, *names: str) -> str:
    """End the ranks, and take `names` from the notebook; what the command said."""
    said = kernel.do("%accelerate stop").stdout
    kernel.do(f"for _name in {names!r}: globals().pop(_name, None)")
    return said


def test_a_session_from_its_start_to_its_end(kernel: RealKernel, start: str) -> None:
    kernel.do("x = 5\ndef twice(value): return 2 * value\nclass Net: pass")
    before = kernel.family()
    begin(kernel, start)
    try:
        ranks = kernel.extra(before, within_s=0.0)
        assert len(ranks) == 2

        # Names last from cell to cell in the ranks, and only there.
        said = kernel.do("%%accelerate\ny = twice(x) + accelerator.process_index\nprint('y is', y)").stdout
        assert "in 2 ranks that stay since" in said
        assert "[rank 0] y is 10\n[rank 1] y is 11" in said or "[rank 1] y is 11\n[rank 0] y is 10" in said
        assert kernel.do("%%accelerate\ny").result == {"text/plain": "10"}
        assert kernel.value("'y' in globals()") is False

        # They come back by --out and pull, and go there by push.
        assert "brought back: y (28 bytes), net" in kernel.do("%%accelerate --out y,net\nnet = Net()").stdout
        assert kernel.value("[y, type(net) is Net]") == [10, True]
        kernel.do("%accelerate pull y --rank 1")
        assert kernel.value("y") == 11
        kernel.do("y = 100")
        kernel.do("%accelerate push y")
        assert kernel.do("%%accelerate --only 1\ny + accelerator.process_index").result == {"text/plain": "101"}

        # Training goes on where it was; other launches have ranks of their own.
        kernel.do(
            """
            %%accelerate
            import torch
            model = accelerator.prepare(torch.nn.Linear(2, 1))
            accelerator.backward(model(torch.ones(1, 2)).sum())
            """
        )
        other = kernel.do("nbaccel.launch(lambda: __import__('os').getpid(), 2).values").result
        assert not any(str(pid) in other["text/plain"] for pid in ranks)
        kernel.do("%%accelerate\naccelerator.backward(model(torch.ones(1, 2)).sum())")

        # An error ends the cell and nothing else; neither does an interrupt while nothing runs.
        assert "on all 2 ranks" in kernel.run("%%accelerate\n1 / 0").failed("ZeroDivisionError").text
        kernel.interrupt()
        assert kernel.do("%%accelerate\ny").result == {"text/plain": "100"}
        assert kernel.extra(before, within_s=0.0) == ranks

        status = kernel.do("%accelerate").stdout
        assert status.startswith("next cell: in ranks that stay since ")
        assert "2 ranks on the CPU, and until %accelerate stop they hold: rank 0 " in status
        assert "they hold: rank 0 " in kernel.do("%accelerate memory").stdout
        assert "-n 3 belongs to the start" in kernel.run("%%accelerate -n 3\ny").failed("LaunchRefused").text

        # Others, with the same flags, know what the notebook knows now.
        kernel.do("%accelerate restart")
        assert set(kernel.extra(before, within_s=0.0)).isdisjoint(ranks)
        assert kernel.do("%%accelerate\nx").result == {"text/plain": "5"}
    finally:
        said = end(kernel, "x", "y", "twice", "Net", "net")
    assert "2 ranks ended; nothing is held any more" in said
    assert kernel.extra(before, within_s=0.0) == {}


def test_what_is_trained_in_ranks_that_stay_is_named_until_it_is_pulled(kernel: RealKernel, start: str) -> None:
    kernel.do(
        """
        import torch
        kept = torch.nn.Linear(2, 1); steps = torch.optim.SGD(kept.parameters(), 0.1)
        """
    )
    begin(kernel, start)
    try:
        training = "for _ in range(2):\n    loss = kept(torch.ones(1, 2)).sum(); loss.backward(); steps.step()"
        trained = kernel.do(f"%%accelerate\n{training}").stdout
        before = "stay in the ranks, and the notebook has what was there before: %accelerate pull kept brings a copy"
        assert f"kept (trained), steps, loss {before}" in trained
        assert "kept" not in kernel.do("%%accelerate\nwith torch.no_grad(): kept(torch.ones(1, 2))").stdout
        kernel.do("%accelerate pull kept")
        assert "kept" not in kernel.do("%%accelerate\nwith torch.no_grad(): kept(torch.ones(1, 2))").stdout
        assert f"kept (trained), steps, loss {before}" in kernel.do(f"%%accelerate\n{training}").stdout
        kernel.do("%accelerate pull loss")
    finally:
        said = end(kernel, "kept", "steps", "loss")
    assert "nothing is held any more; gone with them, as nobody had pulled it: kept (trained), steps" in said


def test_an_interrupt_stops_the_cell_after_the_step_and_the_names_stay(kernel: RealKernel, start: str) -> None:
    begin(kernel, start)
    try:
        kernel.do(
            """
            %%accelerate
            import torch
            model = torch.nn.Linear(2, 1)
            loader = torch.utils.data.DataLoader(torch.ones(8, 2), 2)
            model, loader = accelerator.prepare(model, loader)
            steps = 0
            """
        )
        running = kernel.begin(
            """
            %%accelerate
            print("training")
            while True:
                for x in loader:
                    accelerator.backward(model(x).sum())
                    steps += 1
            """
        )
        running.until_text("training")
        kernel.interrupt()
        running.end().failed("KeyboardInterrupt")
        kernel.do("%accelerate pull steps")
        of_rank_0 = kernel.value("steps")
        kernel.do("%accelerate pull steps --rank 1")
        assert kernel.value("steps") == of_rank_0
        again = kernel.do("%%accelerate\nfor x in loader: accelerator.backward(model(x).sum()); steps += 1\nsteps")
        assert again.result == {"text/plain": str(of_rank_0 + 2)}
    finally:
        end(kernel, "steps")


def test_ranks_out_of_step_are_asked_for_their_names_alone(kernel: RealKernel) -> None:
    begin(kernel, "fork")
    try:
        failed = kernel.run(
            """
            %%accelerate
            kept = 7
            if accelerator.process_index == 1: raise ValueError("in one rank")
            accelerator.wait_for_everyone()
            """
        )
        assert "rank 1 of 2" in failed.failed("ValueError").text
        refusal = kernel.run("%%accelerate\nkept").failed("LaunchRefused").evalue
        assert "the ranks are out of step since Cell In[" in refusal
        assert "(rank 0: 2 collectives; rank 1: 1 collective); so no further cell runs in them" in refusal
        assert "%accelerate restart begins anew" in refusal
        kernel.do("%accelerate pull kept")
        assert kernel.value("kept") == 7
    finally:
        end(kernel, "kept")


def test_a_rank_that_hears_nothing_is_ended_by_two_presses_and_the_session_with_it(kernel: RealKernel) -> None:
    begin(kernel, "fork")
    running = kernel.begin(
        """
        %%accelerate
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        print("deaf")
        import threading
        threading.Event().wait()
        """
    )
    running.until_text("deaf")
    kernel.interrupt()
    kernel.interrupt()
    cell = running.end()
    cell.failed("KeyboardInterrupt")
    assert "none of the ranks that stayed is left: %accelerate restart starts others" in cell.stdout
    kernel.do("%accelerate restart")
    try:
        assert kernel.do("%%accelerate\naccelerator.num_processes").result == {"text/plain": "2"}
    finally:
        end(kernel)


@pytest.mark.timed
def test_a_cell_is_there_and_back_before_anybody_notices(kernel: RealKernel) -> None:
    kernel.do("%%accelerate -n 2 --cpu --keep\nx = 1")
    try:
        kernel.do(
            """
            import time
            def timed():
                began = time.perf_counter()
                get_ipython().run_cell_magic("accelerate", "", "x")
                return time.perf_counter() - began
            times = sorted(timed() for _ in range(20))
            """
        )
        times = kernel.value("times")
    finally:
        end(kernel, "timed", "times")
    print(f"round trip of a cell: {1000 * times[0]:.1f} ms at best, {1000 * times[10]:.1f} ms median")
    assert times[0] < 0.1  # 8 ms on an idle machine: what waits for a clock, or starts a process, takes longer


def test_nothing_of_idle_ranks_survives_the_kernels_sigkill(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel")
    before = kernel.family()
    begin(kernel, "fork")
    assert len(kernel.extra(before, within_s=0.0)) >= 2
    kernel.kill()
    assert kernel.survivors(within_s=1.0) == {}


def test_a_module_that_was_edited_is_reloaded_as_in_the_notebook_or_said(kernel: RealKernel, start: str) -> None:
    kernel.do("""
        import os, sys
        _ = open("edited.py", "w").write("def scale(x): return x * 3\\n")
        sys.path.insert(0, os.getcwd())
        %load_ext autoreload
        %autoreload 2
        from edited import scale
    """)
    begin(kernel, start)
    try:
        assert "30\n" in kernel.do("%%accelerate\nprint(scale(10))").stdout
        edit = "_ = open('edited.py', 'w').write('def scale(x): return x * 5\\n'); os.utime('edited.py', (2e9, 2e9))"
        kernel.do(edit)
        cell = kernel.do("%%accelerate\nprint(scale(10))")
        said = "edited was edited since the ranks imported it, and they have the old one: %accelerate restart"
        assert ("50\n" in cell.stdout, said in cell.stdout) == (start == "fork", start == "zygote")
        assert said not in kernel.do("%%accelerate\nprint(scale(10))").stdout
    finally:
        end(kernel)
        kernel.do("%autoreload 0\nsys.path.remove(os.getcwd()); del sys.modules['edited']")
