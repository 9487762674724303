"""Hand runs of nodes to Inductor, and the whole step to one CUDA graph."""

from wholestep.lower.options import LowerOptions
from wholestep.lower.partial_lower import partial_lower
from wholestep.lower.regions import plan_regions
from wholestep.lower.report import Lowering, RegionReport, explain

__all__ = ["LowerOptions", "Lowering", "RegionReport", "explain", "partial_lower", "plan_regions"]
