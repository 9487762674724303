"""Where the values of a step lie in the user's objects: slots, plain values, containers, the tree of a call."""
