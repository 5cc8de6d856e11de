"""An exception that a rank's program catches after it has ended an exchange half-way: a time limit by an alarm, say."""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel, accelerate

ALARM = """
import os, signal, time, torch
class TimeIsUp({kind}): pass
left = "left-by-an-alarm"
def fire(number, frame):
    while frame is not None and frame.f_code.co_name not in ("_wait_on_host", "_await"):
        frame = frame.f_back
    if frame is None and not {at_any_time}:  # it comes again until this rank waits for the other one
        return signal.setitimer(signal.ITIMER_REAL, 0.02)
    open(left, "w").close()
    raise TimeIsUp("time is up")
_ = signal.signal(signal.SIGALRM, fire)
rank = accelerator.process_index
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=8)
{prepare}
steps = 0
try:
    for epoch in range(100):
        for x in loader:
            if steps == 20 and rank in {alarmed}:
                signal.setitimer(signal.ITIMER_REAL, 0.3 if {at_any_time} else 0.02)
            began = time.monotonic()
            while steps == 20 and rank != {waits} and not ({until}):
                time.sleep(0.01)  # with its data, while the other rank waits for it
            optimizer.zero_grad()
            accelerator.backward(model(x).mean()) if {is_prepared} else model(x).mean().backward()
            optimizer.step()
            steps += 1
except TimeIsUp:
    pass
{after}
"""

IN_DDP = {
    "prepare": "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    "at_any_time": "True",  # Python hears of the alarm when DDP's backward has returned
    "until": "time.monotonic() > began + 0.7",
}


def ends(kernel: RealKernel, start: str, **choices: str) -> str:
    """Return the sentence with which the cell ends; rank 0 has the weights of 20 steps then."""
    given = {"kind": "Exception", "prepare": "", "alarmed": "(0,)", "waits": "0", "after": "print('going on')"}
    given |= {"at_any_time": "False", "until": "os.path.exists(left)"} | choices
    kernel.run("import os; _ = os.path.exists('left-by-an-alarm') and os.remove('left-by-an-alarm')")
    cell = kernel.begin(accelerate(ALARM.format(**given, is_prepared=bool(given["prepare"])), start)).end(50)
    assert cell.error is not None, cell.text
    assert cell.error.ename in ("CollectiveMismatch", "PeerFailed", "RanksFailed"), cell.error.text
    assert kernel.value("steps") == 20
    return cell.error.evalue


def test_a_loop_that_an_alarm_has_ended_inside_of_a_backward_ends_with_a_sentence(
    kernel: RealKernel, start: str
) -> None:
    assert "out of step, and nothing is exchanged any more" in ends(kernel, start)


@pytest.mark.full
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"kind": "RuntimeError"}, id="a class that torch raises too"),
        pytest.param({"alarmed": "(1,)", "waits": "1"}, id="the other rank"),
        pytest.param({"after": "accelerator.gather(torch.ones(100))"}, id="then a gather"),
        pytest.param({"alarmed": "(0, 1)"}, id="both ranks"),
        pytest.param(IN_DDP | {"after": "accelerator.wait_for_everyone()"}, id="prepared, DDP's own sums"),
        pytest.param(IN_DDP, id="prepared, nothing after it"),
    ],
)
def test_the_same_of_other_exceptions_ranks_and_loops(kernel: RealKernel, start: str, choices: dict[str, str]) -> None:
    said = ends(kernel, start, **choices)
    assert "out of step" in said or "have waited for it in a collective" in said
