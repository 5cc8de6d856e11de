"""Libraries whose threads run in the notebook: ranks compute with them, started so that no thread is missing."""

from __future__ import annotations

import importlib.util

import pytest

from fixtures.kernels import Kernels
from kernel.harness import accelerate

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(240)]

LIBRARIES = {
    "polars": (
        """
        import polars
        table = polars.DataFrame({"k": [i % 7 for i in range(20000)], "v": [float(i) for i in range(20000)]})
        def work(): return table.filter(polars.col("k") == 3).group_by("k").agg(polars.col("v").sum())["v"].to_list()
        """,
        "zygote",
    ),
    "numba": (
        """
        import numba, numpy
        @numba.njit(parallel=True)
        def total(x):
            s = 0.0
            for i in numba.prange(len(x)): s += x[i]
            return s
        def work(): return total(numpy.ones(1000))
        """,
        "zygote",
    ),
    "distributed": (
        """
        import dask
        from dask.distributed import Client
        client = Client(processes=False, dashboard_address=None, n_workers=1)
        asked = dask.delayed(sum)([1, 2, 3])
        def work(): return asked.compute()
        """,
        "zygote",
    ),
    "tokenizers": (
        """
        import os; os.environ["TOKENIZERS_PARALLELISM"] = "true"
        from tokenizers import Tokenizer, models
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0"))
        def work(): return sum(each.ids[0] for each in words.encode_batch([f"w{i % 500}" for i in range(2000)]))
        """,
        "fork",
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_the_notebook_has_used_works_in_ranks(new_kernel: Kernels, library: str) -> None:
    if importlib.util.find_spec(library) is None:  # an import would change this process
        pytest.skip(f"{library} is not installed; only these cases need it")
    code, start = LIBRARIES[library]
    kernel = new_kernel()
    kernel.do("%load_ext nbaccel")
    kernel.do(code, timeout_s=120)
    kernel.do("here = work()", timeout_s=120)
    cell = kernel.run(accelerate("there = work()"), timeout_s=180).succeeded()
    assert "2 ranks on CPU" in cell.stdout
    assert (f"zygote, not fork: {library}" in cell.stdout.replace("dask has", "distributed has")) is (start == "zygote")
    assert kernel.value("there == here")
    cell = kernel.do(accelerate("other = 1"))
    assert "zygote" not in cell.stdout, "a cell that does not lead there forks as ever"
