"""Predict time, memory and deadlocks before any rank starts: pipeline schedules (`wholestep.simulate.pipeline`)."""

from wholestep.simulate import pipeline as pipeline

__all__ = ["pipeline"]
