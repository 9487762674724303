"""What the step's Python does beside tensors: print, log, write into lists and dicts. A replay does it again."""
