"""Put what a run measured into the stored benchmark: ``python -m benchmarks.merging NEW STORED``.

Rows and reports of the same names are replaced, others stay. What comes from another run than the file's own says on
which machine, and under which load, it was measured. `make bench-merge ROWS=alternatives` measures and puts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["merged"]

_KINDS = (("rows", "row"), ("reports", "report"))


def merged(stored: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return `stored` with the rows and reports of `new` in the places of those of the same names."""
    found = dict(stored)
    for kind, name in _KINDS:
        theirs = {each[name]: {**each, "machine": new["machine"]} for each in new[kind]}
        found[kind] = [theirs.pop(each[name], each) for each in stored[kind]] + [*theirs.values()]
    return found


def main(new: str, stored: str) -> None:
    path = Path(stored)
    both = merged(json.loads(path.read_text(encoding="utf-8")), json.loads(Path(new).read_text(encoding="utf-8")))
    path.write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")
    print(
        f"merged into {stored}; `make unit PYTEST_ARGS=tests/test_documents.py` says which numbers of pages are others"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
