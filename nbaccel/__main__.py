"""`python -m nbaccel`: the command `nbaccel`, of the Python that is named. Runs in a terminal."""

import sys

from nbaccel.cli import main

sys.exit(main())
