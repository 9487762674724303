"""The command line: `wholestep`, and `python -m wholestep`."""
