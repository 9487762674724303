"""`python -m wholestep`: the command line (`command_line/app.py`)."""

from __future__ import annotations

import sys

from wholestep.command_line.app import main

if __name__ == "__main__":
    sys.exit(main())
