"""Python side effects of a step: print, log, write into lists and dicts. Each replay repeats them."""
