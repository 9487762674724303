"""Fewer bytes for more time: byte budgets, and what the backward recomputes to stay within one."""
