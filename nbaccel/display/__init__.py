"""Data and pictures of a run: its history as plain data, and text, HTML and figures made of it. Runs in the kernel.

It starts nothing, waits for nothing and prints nothing: the code that observes a run feeds a `History`, and the code
that shows the run asks a `Panel` or a figure for a picture. Imports `base`, `output` and the table of `features`.
"""

from __future__ import annotations
