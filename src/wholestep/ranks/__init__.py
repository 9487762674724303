"""Ranks that cannot silently disagree, and waits that all have a deadline."""
