"""The pump in real kernels: clicks arrive in a cell that is busy, and nothing else is lost, early or out of order."""

from __future__ import annotations

from typing import Any

import pytest

from kernel.harness import RealKernel

MAKES_BUTTONS = """
import time, ipywidgets
from nbaccel.features.panel.stop_control import Pump
happened = []
mine, other = ipywidgets.Button(description="mine"), ipywidgets.Button(description="other")
mine.on_click(lambda button: (happened.append("mine"), print("clicked", len(happened))))
other.on_click(lambda button: happened.append("other"))
"""

WAITS_FOR_CLICKS = """
deadline = time.monotonic() + 30
print("waiting")
with Pump.of(get_ipython().kernel, [mine.model_id]) as pump:
    while happened.count("mine") < {clicks} and time.monotonic() < deadline:
        pump.poll()
        time.sleep(0.005)
    print("enough")
    {then}
"""


def waits_for(clicks: int, then: str = "pass") -> str:
    return WAITS_FOR_CLICKS.format(clicks=clicks, then=then)


def click(kernel: RealKernel, name: str, model_ids: dict[str, Any]) -> None:
    """What a front end sends for a click."""
    data = {"method": "custom", "content": {"event": "click"}}
    kernel.send("comm_msg", {"comm_id": model_ids[name], "data": data})


@pytest.fixture
def model_ids(kernel: RealKernel) -> dict[str, Any]:
    kernel.do(MAKES_BUTTONS)
    return dict(kernel.value("{'mine': mine.model_id, 'other': other.model_id}"))


def test_clicks_arrive_while_the_cell_is_busy_and_what_they_print_is_its_output(
    kernel: RealKernel, model_ids: dict[str, Any]
) -> None:
    busy = kernel.begin(waits_for(clicks=2))
    busy.until_text("waiting")
    click(kernel, "mine", model_ids)
    busy.until_text("clicked 1")
    click(kernel, "mine", model_ids)
    assert busy.end().succeeded().stdout == "waiting\nclicked 1\nclicked 2\nenough\n"


def test_all_else_waits_for_the_cells_end_and_keeps_its_order(kernel: RealKernel, model_ids: dict[str, Any]) -> None:
    busy = kernel.begin(waits_for(clicks=1))
    busy.until_text("waiting")
    click(kernel, "other", model_ids)
    behind = [kernel.begin(f"happened.append({name!r}); print({name!r})") for name in ("first", "second")]
    click(kernel, "other", model_ids)
    click(kernel, "mine", model_ids)
    busy.end().succeeded()
    behind.append(kernel.begin("happened.append('third'); print('third')"))
    assert [cell.end().succeeded().stdout for cell in behind] == ["first\n", "second\n", "third\n"]
    happened = kernel.value("happened")
    assert happened[0] == "mine"
    assert [name for name in happened if name != "other"] == ["mine", "first", "second", "third"]
    assert happened.count("other") == 2


def test_a_failing_cell_drops_the_cells_that_waited_behind_it_as_ever(
    kernel: RealKernel, model_ids: dict[str, Any]
) -> None:
    busy = kernel.begin(waits_for(clicks=1, then="1 / 0"), stop_on_error=True)
    busy.until_text("waiting")
    behind = [kernel.begin(f"happened.append({number})") for number in range(3)]
    click(kernel, "mine", model_ids)
    busy.end().failed("ZeroDivisionError")
    assert [cell.end().status for cell in behind] == ["aborted"] * 3
    while kernel.run("pass").status == "aborted":  # ipykernel 6 goes on dropping until its loop comes round
        pass
    assert kernel.value("happened") == ["mine"]


def test_a_message_that_nobody_has_signed_is_not_handled(kernel: RealKernel, model_ids: dict[str, Any]) -> None:
    busy = kernel.begin(waits_for(clicks=1))
    busy.until_text("waiting")
    kernel.send_forged("comm_msg", {"comm_id": model_ids["mine"], "data": {}})
    click(kernel, "mine", model_ids)
    busy.end().succeeded()
    assert kernel.value("happened") == ["mine"]


def test_a_kernel_without_the_private_parts_has_no_pump(kernel: RealKernel) -> None:
    kernel.do("from nbaccel.features.panel.stop_control import Pump")
    assert kernel.value("Pump.of(type('Kernel', (), {})(), []) is None")
