"""The record of a run: its history as plain data, and its words, as a block and as a line. Runs in the kernel.

It starts nothing and waits for nothing: the code that observes a run feeds a `History`, and a view writes what is due.
What draws stands in `features/panel`. Imports `base`, `output` and the table of `features`.
"""

from __future__ import annotations
