"""Python ints and floats that are inputs of the graph."""
