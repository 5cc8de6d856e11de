"""Rich output of ranks: shown, and updated in place, also what earlier cells have displayed."""

from __future__ import annotations

from fixtures.kernels import Kernels
from kernel.harness import Cell, RealKernel, accelerate


def shown(cell: Cell, mime: str) -> list[str]:
    return [data[mime] for data in cell.displays if mime in data]


def test_html_is_shown_where_it_was_displayed(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(
        accelerate("from IPython.display import HTML, display\nprint('before')\ndisplay(HTML('<b>bold</b>'))", start)
    )
    assert shown(cell, "text/html") == ["<b>bold</b>"]
    assert "before" in cell.stdout


def test_a_display_is_updated_in_place(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(
        accelerate(
            """
            from IPython.display import HTML, display
            handle = display(HTML("step 0"), display_id=True)
            for step in range(1, 4):
                handle.update(HTML(f"step {step}"))
            """,
            start,
        )
    )
    assert shown(cell, "text/html") == ["step 3"]


def test_shown_and_open_figures_appear(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(
        accelerate(
            """
            %matplotlib inline
            import matplotlib.pyplot as plt
            plt.plot([1, 2, 3])
            plt.show()
            plt.figure()
            plt.plot([3, 2, 1])
            """,
            start,
        )
    )
    assert len(shown(cell, "image/png")) == 2


def test_figures_appear_after_the_kernel_itself_has_plotted(kernel: RealKernel, start: str) -> None:
    own = kernel.do("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()")
    assert len(shown(own, "image/png")) == 1
    cell = kernel.do(accelerate("plt.plot([1, 2, 3])\nplt.show()", start))
    assert len(shown(cell, "image/png")) == 1


def test_a_notebook_progress_bar_appears_as_text(kernel: RealKernel, start: str) -> None:
    kernel.do("from tqdm.notebook import tqdm as early_tqdm")
    cell = kernel.do(
        accelerate(
            """
            from tqdm.auto import tqdm
            for _ in tqdm(range(7), desc="late"):
                pass
            for _ in early_tqdm(range(9), desc="early"):
                pass
            """,
            start,
        )
    )
    for bar in ("late: 100%", "7/7", "early: 100%", "9/9"):
        assert bar in cell.text, cell.text
    assert not any("widget-view" in mime for data in cell.displays for mime in data)


def test_a_bar_that_a_forked_cell_has_imported_first_is_the_notebooks_own(new_kernel: Kernels) -> None:
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel")
    cell = kernel.do(accelerate("from tqdm.auto import tqdm\nfor _ in tqdm(range(7)): pass", "fork"))
    assert "7/7" in cell.text
    kernel.do("import tqdm.auto as auto, tqdm.notebook as notebook")
    assert kernel.value("tqdm is auto.tqdm and issubclass(tqdm, notebook.tqdm_notebook)") is True


def test_a_ranks_clear_output_spares_the_notebooks_own_output(kernel: RealKernel, start: str) -> None:
    kernel.do("from IPython.display import clear_output, display, HTML")
    cell = kernel.do(
        accelerate(
            """
            print("printed")
            display(HTML("old"))
            clear_output()
            display(HTML("new"))
            """,
            start,
        )
    )
    assert cell.sent["clear_output"] == 0
    assert shown(cell, "text/html") == ["new"]
    assert "printed" in cell.stdout


def test_the_value_of_the_last_expression_is_shown(kernel: RealKernel, start: str) -> None:
    cell = kernel.do(accelerate("6 * 7", start))
    texts = [data.get("text/plain") for data in [*cell.displays, cell.result or {}]]
    assert "42" in texts, (cell.displays, cell.result)


def test_displays_of_earlier_cells_pages_and_widgets_are_within_reach_of_rank_0(kernel: RealKernel) -> None:
    kernel.do("""
        from IPython.display import display
        import ipywidgets
        handle = display("waiting", display_id="nearly")
        def train():
            return sum(range(10))
    """)
    cell = kernel.do(
        accelerate(
            """
            handle.update("step 2")
            get_ipython().set_next_input("1 + 1")
            made = ipywidgets.IntProgress(value=2)
            %prun -l 3 train()
            """,
            "fork",
        )
    )
    assert cell.elsewhere["nearly"] == {"text/plain": "'step 2'"}
    pages = {payload["source"]: payload for payload in cell.payloads}
    assert "function calls" in pages["page"]["data"]["text/plain"]
    assert pages["set_next_input"]["text"] == "1 + 1"
    assert "not brought back: made (a widget)" in cell.text
    cell = kernel.do(accelerate('train??\nget_ipython().run_cell("1 / 0")', "fork"))
    (page,) = cell.payloads
    assert "return sum(range(10))" in page["data"]["text/plain"]
    assert "ZeroDivisionError: division by zero" in cell.text
    assert "\x1b[" not in page["data"]["text/plain"] + cell.text


def test_an_output_widget_is_said_not_to_take_what_ranks_print_and_hides_no_error(kernel: RealKernel) -> None:
    kernel.do("import ipywidgets, nbaccel\nout = ipywidgets.Output()\ndef work(): print('from a function')")
    cell = kernel.do(accelerate("with out:\n    print('in it')\nprint('after')", "fork", n=2))
    assert cell.stdout.count("what ranks print stands below the cell, also inside of `with` and an Output widget") == 1
    assert "in it\nafter" in cell.stdout
    assert kernel.run(accelerate("with out:\n    1 / 0", "fork", n=2)).failed("ZeroDivisionError")
    cell = kernel.do("with out:\n    nbaccel.launch(work, 2)")
    assert "from a function" in cell.stdout
    assert any(state.get("msg_id") == "" for state in cell.widgets.values()), "it took what came meanwhile"
