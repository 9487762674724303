"""Random training steps, run in eager and as a graph and compared to the bit: see docs/notes/fuzzing.md."""
