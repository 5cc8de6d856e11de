"""The panel of a run, its picture, and the button that stops it: all that draws. Runs in the kernel.

It hooks in as what shows a run in a notebook (`notebook_views`), and by the methods of `Run` that return a picture. The
core writes lines of text without it. Features that show something of their own draw by it: the runs of a sweep, the
table of `nbaccel.runs`, the report of a check. Imports `display`, `launching`, `output` and `base`.
"""
