"""Graphs in which some nodes of an iteration run in the next one."""
