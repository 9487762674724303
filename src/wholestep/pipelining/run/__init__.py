"""Stages on ranks: communication, computation, gradient reduction, schedules."""
