"""Plans of placements: which tensor is whole, sharded or partial where. Capture traces under a plan, so that every
parallelism ends as collectives in the graph."""

from wholestep.parallel.plan import FullyShard, Plan, Replicate

__all__ = ["FullyShard", "Plan", "Replicate"]
