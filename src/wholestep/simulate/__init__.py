"""Predict time, memory and deadlocks before any rank starts.

step        one step of one rank: its time, exposed communication, memory, bounds (`StepTimeline`)
deadlock    whether the orders in which ranks issue collectives contradict each other
pipeline    pipeline schedules (`wholestep.simulate.pipeline`)
"""

from wholestep.simulate import pipeline as pipeline
from wholestep.simulate.exposed_collectives import ExposedCollective
from wholestep.simulate.issue_order import Issue, IssueConflict, deadlock, issues_of
from wholestep.simulate.machine import (
    A100,
    CPU,
    H100,
    H200,
    CollectiveModel,
    GroupSpread,
    Link,
    Machine,
    MeasuredCollective,
    fit_link,
)
from wholestep.simulate.measured_step import MeasuredRow, MeasuredStep
from wholestep.simulate.profile import StepProfile, calibrate, profile_of
from wholestep.simulate.step_timeline import LowerBounds, NodeSpan, StepTimeline, step

__all__ = [
    "A100",
    "CPU",
    "H100",
    "H200",
    "CollectiveModel",
    "ExposedCollective",
    "GroupSpread",
    "Issue",
    "IssueConflict",
    "Link",
    "LowerBounds",
    "Machine",
    "MeasuredCollective",
    "MeasuredRow",
    "MeasuredStep",
    "NodeSpan",
    "StepProfile",
    "StepTimeline",
    "calibrate",
    "deadlock",
    "fit_link",
    "issues_of",
    "pipeline",
    "profile_of",
    "step",
]
