"""A Python step becomes a record of a graph, its inputs and its guards, with no hidden inputs."""
