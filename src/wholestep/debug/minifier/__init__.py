"""Minimise a failing graph, in processes that may crash."""
