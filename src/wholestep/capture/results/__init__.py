"""After the trace: what the step returned and changed, compared with the effects of the graph."""
