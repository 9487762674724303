"""Where to cut, which schedule to use, and whether it can work."""
