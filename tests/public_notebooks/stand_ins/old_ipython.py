"""The function of IPython before 9 that chooses a format of plots."""

import IPython.display

IPython.display.set_matplotlib_formats = lambda *formats: None
