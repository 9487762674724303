"""`torch.distributed.pipelining.stage`: a stage on a rank. `build_stage` gives ours, `PipelineStage` is torch's."""

from wholestep.compat import forwarded_names
from wholestep.pipelining import PipelineStage as PipelineStage
from wholestep.pipelining import Stage as Stage
from wholestep.pipelining import build_stage as build_stage

__all__ = ["PipelineStage", "Stage", "build_stage"]

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining.stage", globals())
