"""An exception that a rank's program catches after it has ended an exchange half-way: a time limit by an alarm, say."""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel, accelerate

ALARM = """
import signal, time, torch
class TimeIsUp({kind}): pass
def fire(number, frame): raise TimeIsUp("time is up")
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
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            if steps == 20 and rank == 1:
                time.sleep(0.7)  # with its data, while rank 0 waits for it
            optimizer.zero_grad()
            accelerator.backward(model(x).mean()) if {is_prepared} else model(x).mean().backward()
            optimizer.step()
            steps += 1
except TimeIsUp:
    pass
{after}
"""

PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


def ends(kernel: RealKernel, start: str, **choices: str) -> str:
    """Return the sentence with which the cell ends; rank 0 has the weights of 20 steps then."""
    given = {"kind": "Exception", "prepare": "", "alarmed": "(0, 1)", "after": "print('going on')"} | choices
    cell = kernel.begin(accelerate(ALARM.format(**given, is_prepared=bool(given["prepare"])), start)).end(50)
    assert cell.error is not None, cell.text
    assert cell.error.ename in ("CollectiveMismatch", "PeerFailed", "RanksFailed"), cell.error.text
    assert kernel.value("steps") == 20
    return cell.error.evalue


@pytest.mark.full  # on a busy machine the alarm may come between two exchanges, and then the cell ends well
def test_a_loop_that_an_alarm_has_ended_inside_of_a_backward_ends_with_a_sentence(
    kernel: RealKernel, start: str
) -> None:
    assert "out of step, and nothing is exchanged any more" in ends(kernel, start)


@pytest.mark.full
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"kind": "RuntimeError"}, id="a class that torch raises too"),
        pytest.param({"alarmed": "(1,)", "after": "accelerator.gather(torch.ones(100))"}, id="one rank, then a gather"),
        pytest.param({"alarmed": "(0,)"}, id="the rank that waits"),
        pytest.param({"prepare": PREPARE, "after": "accelerator.wait_for_everyone()"}, id="prepared, DDP's own sums"),
        pytest.param({"prepare": PREPARE}, id="prepared, nothing after it"),
    ],
)
def test_the_same_of_other_exceptions_ranks_and_loops(kernel: RealKernel, start: str, choices: dict[str, str]) -> None:
    said = ends(kernel, start, **choices)
    assert "out of step" in said or "have waited for it in a collective" in said
