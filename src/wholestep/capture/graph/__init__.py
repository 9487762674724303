"""The graph under construction: nodes, values, writes, inputs, and the operators that cannot be in it."""
