"""Predict before anything runs: pipeline schedules (`wholestep.simulate.pipeline`)."""

from wholestep.simulate import pipeline as pipeline

__all__ = ["pipeline"]
