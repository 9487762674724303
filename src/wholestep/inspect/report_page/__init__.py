"""The page of a step: one HTML file with its time, memory, graph, passes and modules (`ws.inspect.report`)."""
