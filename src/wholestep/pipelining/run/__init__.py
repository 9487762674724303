"""Stages on ranks: what they send, receive, compute and reduce."""
