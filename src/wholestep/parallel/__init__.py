"""Plans for parallelism: which tensor is replicated, sharded or partial on which mesh axis. Capture traces under a
plan, so all communication becomes collectives in the graph."""

from wholestep.parallel.plan import FullyShard, Plan, Replicate

__all__ = ["FullyShard", "Plan", "Replicate"]
