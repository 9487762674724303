"""Work of iteration n that runs in iteration n+1: pending updates and the graphs that take them up."""
