"""When a captured graph may run again: conditions on a call, and why one failed."""
