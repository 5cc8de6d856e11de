"""`python -m nbaccel`: the command `nbaccel`, run by the Python that is named. Runs in a terminal."""

import sys

from nbaccel.cli import main

sys.exit(main())
