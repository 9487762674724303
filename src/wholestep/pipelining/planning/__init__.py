"""Where to cut and which schedule to use, by estimated or measured costs."""
