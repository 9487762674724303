"""Python ints and floats that are scalar inputs of the graph, or computed from those."""
