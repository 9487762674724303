"""After the trace: what the step returned and changed, compared with what the graph does."""
