"""The Stop button of a running cell, in real kernels, with a front end that says what front ends say."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kernel.harness import Cell, Execution, RealKernel, accelerate

VIEW = "application/vnd.jupyter.widget-view+json"

TRAINS = """
import time, torch
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(400_000, 8), torch.arange(400_000) % 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
steps = 0
for x, y in loader:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({{"loss": loss}})
    steps += 1
    {then}
"""

FALLS_ASLEEP = "print('asleep') or time.sleep(600) if steps == 5 else time.sleep(0.02)"
"""A step that no stop at its end will see the end of."""


def sleeps(cell: Cell) -> bool:
    return "asleep" in cell.text


def trains(then: str = "time.sleep(0.02)") -> str:
    return accelerate(TRAINS.format(then=then), flags="--out steps")


class FrontEnd:
    """The page that shows one running cell: it renders widgets, and somebody clicks."""

    def __init__(self, kernel: RealKernel, running: Execution) -> None:
        self._kernel = kernel
        self._running = running

    def show(self, *, after_end: bool = False) -> None:
        """Render the panel's widgets, and say so as ipywidgets do."""
        self._running.until(lambda cell: cell.frames and VIEW in cell.panel, after_end=after_end)
        self._send(self.button_id, {"method": "update", "state": {"_view_count": 1}, "buffer_paths": []})

    def click(self) -> None:
        self._send(self.button_id, {"method": "custom", "content": {"event": "click"}})

    def lose_sight(self, model_id: str, subshell_id: str) -> None:
        """Say that the button is shown no longer, to the subshell that JupyterLab lets the kernel have for widgets."""
        self._send(model_id, {"method": "update", "state": {"_view_count": 0}, "buffer_paths": []}, subshell_id)

    @property
    def label(self) -> str:
        return str(self._running.cell.widgets[self.button_id]["description"])

    def until_it_follows(self) -> None:
        """Return when the ranks train, and new states of the panel come in its widgets alone."""
        displayed, states = -1, set[str]()

        def follows(cell: Cell) -> bool:
            nonlocal displayed
            if len(cell.frames) != displayed:
                displayed = len(cell.frames)
                states.clear()
            states.update(value for state in cell.widgets.values() if "loss" in (value := state.get("value", "")))
            return len(states) >= 3

        self._running.until(follows)

    @property
    def button_id(self) -> str:
        return self._id_of("description")

    def _id_of(self, name: str) -> str:
        return next(model_id for model_id, state in self._running.cell.widgets.items() if state.get(name))

    def _send(self, model_id: str, data: dict[str, Any], subshell_id: str | None = None) -> None:
        self._kernel.send("comm_msg", {"comm_id": model_id, "data": data}, subshell_id=subshell_id)


OPEN_WIDGETS = """[
    comm.comm_id for comm in get_ipython().kernel.comm_manager.comms.values() if comm.target_name == "jupyter.widget"
]"""

IS_BUSY = """
import threading
_subshell = next(thread for thread in threading.enumerate() if thread.name == "subshell-{subshell_id}")
_is_held, _is_asked = threading.Event(), threading.Event()
_stop, _subshell.stop = _subshell.stop, lambda: (_stop(), _is_asked.set())
_subshell.io_loop.add_callback(lambda: (_is_held.set(), _is_asked.wait(30)))
_is_held.wait()
"""
"""A subshell does nothing until it is asked to end, as on a busy machine; what came meanwhile it finds together."""


def stopped(kernel: RealKernel, stop: Callable[[FrontEnd], None]) -> tuple[Cell, float]:
    """Run a cell and stop it; the cell, and the seconds from there to its end."""
    running = kernel.begin(trains())
    page = FrontEnd(kernel, running)
    page.show()
    page.until_it_follows()
    stopped_at = time.monotonic()
    stop(page)
    cell = running.end()
    return cell, time.monotonic() - stopped_at


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_first_click_ends_the_run_after_the_step_within_a_second(kernel: RealKernel) -> None:
    seconds: list[float] = []
    limit_s = 1.0
    while len(seconds) < 5 and min(seconds, default=9.0) > limit_s:
        cell, took = stopped(kernel, FrontEnd.click)
        seconds.append(took)
        said = cell.failed("KeyboardInterrupt").evalue
        assert said.startswith("the run was interrupted after")
        assert f"every rank had done {kernel.value('steps')} steps" in said
        if took > limit_s:  # a machine that is busy has bad moments; an interrupt, which needs no pump, has them too
            limit_s = max(limit_s, 2 * stopped(kernel, lambda page: kernel.interrupt())[1])
    print(f"{kernel.environment.name}: from the click to the cell's end {min(seconds) * 1000:.0f} ms")
    assert min(seconds) < limit_s


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_what_is_kept_is_one_picture_and_no_widget(kernel: RealKernel) -> None:
    cell, _ = stopped(kernel, FrontEnd.click)
    assert cell.panels == 1
    assert sorted(cell.panel) == ["image/png", "text/plain"]
    assert cell.widgets == {}


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_last_word_of_a_page_does_not_meet_the_end_of_its_subshell(kernel: RealKernel) -> None:
    subshell_id = kernel.start_subshell()
    if subshell_id is None:
        pytest.skip("this ipykernel has no subshells")
    running = kernel.begin(trains(then="time.sleep(0.02)\n    if steps == 50: break"))
    page = FrontEnd(kernel, running)
    page.show()
    button_id = page.button_id
    running.end().succeeded()
    kernel.do(IS_BUSY.format(subshell_id=subshell_id))
    page.lose_sight(button_id, subshell_id)
    open_ids = kernel.value(OPEN_WIDGETS)
    behind = kernel.begin("pass")  # in which the subshell would complain
    behind.end()
    if not open_ids:  # what makes JupyterLab end it
        kernel.end_subshell(subshell_id)
    kernel.do("_is_asked.set()")
    assert behind.cell.stderr == ""
    assert button_id in open_ids
    kernel.end_subshell(subshell_id)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_second_click_does_not_wait_for_the_step(kernel: RealKernel) -> None:
    running = kernel.begin(trains(then=FALLS_ASLEEP))
    page = FrontEnd(kernel, running)
    page.show()
    page.until_it_follows()
    running.until(sleeps)
    assert page.label == "Stop after this step"
    page.click()
    running.until(lambda cell: page.label == "Stop now")
    page.click()
    running.end(timeout_s=30).failed("KeyboardInterrupt")


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_after_an_interrupt_the_button_offers_what_comes_next(kernel: RealKernel) -> None:
    running = kernel.begin(trains(then=FALLS_ASLEEP))
    page = FrontEnd(kernel, running)
    page.show()
    page.until_it_follows()
    running.until(sleeps)
    kernel.interrupt()
    running.until(lambda cell: page.label == "Stop now")
    page.click()
    running.end(timeout_s=30).failed("KeyboardInterrupt")


@pytest.mark.slow
def test_where_nobody_shows_widgets_the_panel_says_how_to_stop_and_has_no_button(kernel: RealKernel) -> None:
    running = kernel.begin(trains())
    cell = running.until(lambda cell: cell.frames and VIEW not in cell.panel)
    running.until(lambda cell: "Stop: interrupt the kernel" in cell.panel["text/html"])
    assert cell.widgets == {}
    kernel.interrupt()
    running.end().failed("KeyboardInterrupt")
