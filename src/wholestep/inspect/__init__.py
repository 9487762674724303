"""Show a person what happened: drawings of graphs."""
