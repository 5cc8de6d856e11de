"""The command behind ``make gpu``: what a machine with a CUDA device finds, as tests and as lines of JSON.

    make gpu                                   all of it: by estimate 15 minutes on a large card, 17 on two T4
    make gpu GPU_TESTS="-k pinned"             some of it; the arguments are pytest's
    make gpu GPU_PYTHON=/opt/conda/bin/python  by another Python

It ends with 2, at once and with a sentence, where there is no card, no torch for it, or a package is missing. The
last thing that it prints is a table of outcomes and facts; they are also in the file that it names.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from gpu import facts, machine


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m gpu", description="The tests on a CUDA device.")
    options.add_argument("--facts", type=Path, default=Path("build/gpu-facts.jsonl"), help="file for the facts")
    options.add_argument("--seconds", type=float, default=float("inf"), help="what does not fit into them is skipped")
    known, arguments = options.parse_known_args()
    os.environ[facts.ENDS_AT] = str(time.time() + known.seconds)
    if code := machine.main(["tests"]):
        return code
    import pytest

    path = known.facts.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.environ[facts.FILE] = str(path)
    facts.append(path, {"machine": machine.about()})
    used, why = machine.use_once()
    facts.append(path, {"first_use": used})
    if why:
        print(why, file=sys.stderr)
        return machine.NOT_READY
    sys.path.insert(0, os.getcwd())  # as `python -m pytest` has it
    folder = os.path.relpath(Path(__file__).parent)
    try:
        with machine.kept_awake():
            asked = [folder, "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
            return int(pytest.main(asked))
    finally:  # pytest itself may raise, and whoever loses patience interrupts
        print(f"\n{facts.table(facts.read(path))}\nwritten to {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
