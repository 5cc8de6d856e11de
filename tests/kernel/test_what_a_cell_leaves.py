"""A cell in ranks leaves the notebook as the same cell would: names, objects, and what they share. In real kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.harness import RealKernel, accelerate
from leaving import CELLS, IMPORTS, NETWORK, SEED

ALL_STARTS = ("fork", "zygote", "inline")

LOOKS = f"""
import torch
torch.set_num_threads(1)
import sys as _sys
_sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from leaving import described as _described, made as _made
_sys.path.pop(0)
_not_the_cells = {{"In", "Out", "get_ipython", "exit", "quit", "open", "nbaccel"}}
"""

ALL_NAMES = "{name: value for name, value in globals().items() if name[0] != '_' and name not in _not_the_cells}"

HALF_WAY = "loss = train(model, optimizer)\nmodel.history = [loss.item()]; half = 1\n"
"""Of a cell that ends too early, in one way or another."""


def run_plainly(kernel: RealKernel, before: str, cell: str) -> None:
    """In a namespace of its own, where `is_left_as_plainly` finds what the plain cell leaves."""
    kernel.do(f"{LOOKS}\n_here = _made({before!r})\nexec({cell!r}, _here)\n_drawn = torch.get_rng_state()")


def is_left_as_plainly(kernel: RealKernel) -> bool:
    """Whether the notebook is as `run_plainly` has left its namespace; an assertion shows the first difference."""
    there, here = kernel.value(f"[[repr(one) for one in _described(names)] for names in ({ALL_NAMES}, _here)]")
    for one, other in zip(there, here, strict=False):
        at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), 0)
        assert one == other, f"{one[max(0, at - 200) : at + 100]}\nand not\n{other[max(0, at - 200) : at + 100]}"
    assert kernel.value("torch.equal(_drawn, torch.get_rng_state())")
    return len(there) == len(here)


@pytest.mark.sample(15)
@pytest.mark.parametrize("start", ALL_STARTS)
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_in_ranks_leaves_what_the_plain_cell_leaves(kernel: RealKernel, name: str, start: str) -> None:
    before, cell = CELLS[name]
    cell = f"{SEED}\n{cell}"
    run_plainly(kernel, before, cell)
    kernel.do(IMPORTS + before)
    kernel.do(accelerate(cell, start, n=1 if start == "inline" else 2))
    assert is_left_as_plainly(kernel)


REBINDING = """
import torch
part = torch.nn.Linear(2, 1)
def fit():
    global part
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    for _ in range(2):
        part(torch.ones(1, 2)).sum().backward(); optimizer.step()
    part = torch.nn.Sequential(part)
"""


def test_a_name_that_a_library_binds_again_is_said_once(kernel: RealKernel, start: str) -> None:
    """As botorch does with its models."""
    kernel.do(REBINDING)
    line = kernel.do(accelerate("fit()", start, 2)).stdout.partition("brought back: ")[2].partition("\n")[0]
    assert line.startswith("part (3 parameters)"), line
    assert line.count("3 parameters") == 1, line


def test_magics_below_leave_their_cells_names(kernel: RealKernel, start: str) -> None:
    kernel.do("seen = []")
    cell = kernel.do(accelerate("%%time\nimport math\na = [1]; seen.append(a)", start))
    assert kernel.value("[a, seen, seen[0] is a, math.floor(1.5)]") == [[1], [[1]], True, 1]
    assert "Wall time" in cell.text
    cell = kernel.do(accelerate("%%capture text\nprint('quiet')\nb = 2; seen.append(b)", start))
    assert kernel.value("[b, seen, text.stdout]") == [2, [[1], 2], "quiet\n"]
    assert "quiet" not in cell.text
    kernel.do(accelerate("c = %sx echo 5\nseen.append(c[0])", start))
    assert kernel.value("seen") == [[1], 2, "5"]


def test_what_was_trained_before_an_error_is_there(kernel: RealKernel, start: str) -> None:
    run_plainly(kernel, NETWORK, f"{SEED}\n{HALF_WAY}")
    kernel.do(IMPORTS + NETWORK)
    cell = kernel.run(accelerate(f"{SEED}\n{HALF_WAY}raise ValueError('the second half')", start))
    cell.failed("ValueError")
    assert is_left_as_plainly(kernel)
    assert "brought back from the failed run: model trained in place (74 parameters)" in cell.text


def test_what_was_trained_before_an_interrupt_is_there(kernel: RealKernel, start: str) -> None:
    run_plainly(kernel, NETWORK, f"{SEED}\n{HALF_WAY}")
    kernel.do(IMPORTS + NETWORK)
    running = kernel.begin(
        accelerate(f"{SEED}\n{HALF_WAY}import time; print('there')\nwhile True: time.sleep(1)", start)
    )
    running.until_text("there")
    kernel.interrupt()
    cell = running.end()
    cell.failed("KeyboardInterrupt")
    kernel.do("del time")
    assert is_left_as_plainly(kernel)
    assert "brought back from the stopped run: model trained in place" in cell.text


def test_what_rank_0_had_is_there_after_the_death_of_another(kernel: RealKernel, start: str) -> None:
    run_plainly(kernel, NETWORK, f"{SEED}\n{HALF_WAY}")
    kernel.do(IMPORTS + NETWORK)
    dies = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\nwhile True: time.sleep(1)"
    cell = kernel.run(accelerate(f"{SEED}\n{HALF_WAY}{dies}", start))
    assert cell.status == "error"
    kernel.do("del time, os")
    assert is_left_as_plainly(kernel)
    assert "brought back from the failed run: model trained in place" in cell.text


TRAINER = f"""{NETWORK}
import threading, weakref
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.history = model, optimizer, []
        self.lock, self.weakly = threading.Lock(), weakref.ref(model)
    def fit(self):
        with self.lock: self.history.append(train(self.model, self.optimizer).item())
        self.best_, self.event_ = dict(loss=self.history[-1]), threading.Event()
trainer = Trainer(model, optimizer)
"""


def test_a_trainer_that_cannot_travel_is_trained_where_it_is(kernel: RealKernel) -> None:
    run_plainly(kernel, TRAINER, f"{SEED}\ntrainer.fit(); trainer = trainer.history, trainer.best_, model, optimizer")
    kernel.do(IMPORTS + TRAINER + "lock, same = trainer.lock, trainer")
    cell = kernel.do(accelerate(f"{SEED}\ntrainer.fit()", "fork"))
    assert kernel.value("[same is trainer, trainer.lock is lock, trainer.weakly() is model, lock.locked()]") == [
        *(True, True, True, False)
    ]
    assert "model trained in place (74 parameters), optimizer, trainer" in cell.text
    assert "trainer.event_ (an Event" in cell.text or "trainer.event_ (a lock" in cell.text
    kernel.do("trainer = trainer.history, trainer.best_, model, optimizer; del lock, same")
    assert is_left_as_plainly(kernel)


def test_where_ranks_trained_apart_nothing_of_the_notebook_is_written_over(kernel: RealKernel, start: str) -> None:
    kernel.do(IMPORTS + NETWORK + "before = copy.deepcopy(model.state_dict()); history = []; kept = 'old'")
    body = "import os\nwith torch.no_grad(): model[0].weight += 1 + int(os.environ['RANK'])\n"
    body += "history.append(1); made = (each for each in ''); kept = new = 1"
    cell = kernel.do(accelerate(body, start))
    assert kernel.value("[torch.equal(model[0].weight, before['0.weight']), history, kept, new]") == [
        True,
        [],
        "old",
        1,
    ]
    assert "not brought back: model, history, kept (as before: the ranks differ), made (a generator)" in cell.text
    assert "model differs between the ranks" in cell.text


def test_what_only_the_copy_in_a_rank_has_is_no_error_where_ranks_trained_apart(kernel: RealKernel) -> None:
    grown = "class Grown:\n    def __setstate__(self, state): self.__dict__.update(state); self.more = [0]\n"
    kernel.do(IMPORTS + NETWORK + grown + "grown = Grown(); grown.here = 1")
    body = "import os\nwith torch.no_grad(): model[0].weight += 1 + int(os.environ['RANK'])\n"
    cell = kernel.do(accelerate(body + "grown.more.append(1); grown.here = 2", "zygote"))
    assert "not brought back: model, grown (as before: the ranks differ)\n" in cell.text
    assert kernel.value("vars(grown)") == {"here": 1}


def test_names_of_out_and_no_others(kernel: RealKernel, start: str) -> None:
    kernel.do("a = [1]; b = [1]")
    kernel.do(accelerate("a.append(2); b.append(2); c = d = 3", start, flags="--out a,c"))
    assert kernel.value("[a, b, c, 'd' in globals()]") == [[1, 2], [1], 3, False]
    cell = kernel.do(accelerate("a.append(3); d = 4", start, flags="--out none"))
    assert kernel.value("[a, 'd' in globals()]") == [[1, 2], False]
    assert "add them to --out" in cell.text


def test_an_accelerator_of_the_cell_is_one_of_the_notebooks_own(kernel: RealKernel, start: str) -> None:
    kernel.do(IMPORTS + NETWORK)
    kernel.do(
        accelerate(
            "from nbaccel import Accelerator\naccelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
            "net, optimizer = accelerator.prepare(model, optimizer)\ntrain(net, optimizer)",
            start,
        )
    )
    assert kernel.value("[accelerator.num_processes, accelerator.gradient_accumulation_steps, net is model]") == [
        *(1, 2, True)
    ]
    kernel.do("accelerator.save_model(net, 'saved'); accelerator.print(accelerator.unwrap_model(net) is net)")


def test_buffers_queues_events_and_widgets_are_changed_in_place_and_what_cannot_be_is_named(kernel: RealKernel) -> None:
    kernel.do("""
        import io, itertools, logging, queue, threading, types
        import ipywidgets, tqdm
        from matplotlib.figure import Figure

        raw, text, items, done, log = io.BytesIO(), io.StringIO(), queue.Queue(), threading.Event(), logging.Logger("a")
        record = types.SimpleNamespace(out=io.StringIO(), rows=[], same=raw)
        bar, shown = tqdm.tqdm(total=9, file=io.StringIO()), ipywidgets.IntProgress(max=9)
        axes, numbers, untouched = Figure().subplots(), iter(range(9)), (i for i in range(9))
        quiet, model = io.StringIO("as it was"), torch.nn.Linear(2, 2)
        woken = []
        waits = [threading.Thread(target=lambda: woken.append(done.wait(60)), daemon=True)]
        waits[0].start()
        before = [id(each) for each in (raw, text, items, done, log, record.out, bar, shown)]
    """)
    cell = kernel.do(
        accelerate(
            """
            with torch.no_grad():
                model.bias += 1
            torch.save(model.state_dict(), raw)
            print("step", file=text), items.put(model), items.put([1]), done.set(), log.setLevel(logging.DEBUG)
            record.out.write("x"), record.rows.append(1)
            _ = bar.update(3), axes.plot([1, 2]), next(numbers), quiet.getvalue(), untouched
            shown.value += 2
            """,
            "fork",
        )
    )
    assert kernel.value("before == [id(each) for each in (raw, text, items, done, log, record.out, bar, shown)]")
    kernel.do("""
        waits[0].join(60)
        raw.seek(0)
        came = [torch.equal(torch.load(raw)["bias"], model.bias), text.getvalue(), items.get() is model, items.get()]
        came += [done.is_set(), woken, log.level, record.out.getvalue(), record.rows, record.same is raw, bar.n]
        came += [shown.value]
    """)
    assert kernel.value("came") == [True, "step\n", True, [1], True, [True], 10, "x", [1], True, 3, 2]
    (line,) = (line for line in cell.text.splitlines() if "not brought back" in line)
    named = line.partition("not brought back: ")[2]
    assert "axes (its figure is drawn in the rank: --out brings it)" in named
    assert "numbers (a range_iterator cannot be set on: make it in the cell that reads it)" in named
    assert not any(name in line for name in ("quiet", "untouched", "waits"))
