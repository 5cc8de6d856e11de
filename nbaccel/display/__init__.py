"""Data and pictures of a run: its history as plain data, and text, HTML and figures made of it. Runs in the kernel.

The package imports no other package of the project, starts nothing, waits for nothing and prints nothing. The code that
observes a run feeds a `History`; the code that shows the run asks a `Panel` or a figure for a picture.
"""

from __future__ import annotations
