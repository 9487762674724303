"""`python -m wholestep`: the command line (`inspect/command_line.py`)."""

from __future__ import annotations

import sys

from wholestep.inspect.command_line import main

if __name__ == "__main__":
    sys.exit(main())
