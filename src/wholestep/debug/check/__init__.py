"""Eager and a compiled step side by side, from the same state: what `ws.check` and `check_first=` do."""
