"""`torch.distributed.pipelining` and PiPPy under their submodule paths, on `wholestep.pipelining`.

from wholestep.compat.pipelining import pipeline, ScheduleGPipe, SplitPoint
from wholestep.compat.pipelining.schedules import ScheduleGPipe
from wholestep.compat.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks

Cutting, stages, microbatches and both halves of a backward are ours. Schedules are torch's, which our stages run under.
"""

from wholestep.compat import forwarded_names
from wholestep.pipelining import Pipe as Pipe
from wholestep.pipelining import PipelineStage as PipelineStage
from wholestep.pipelining import PipeSplitWrapper as PipeSplitWrapper
from wholestep.pipelining import Schedule1F1B as Schedule1F1B
from wholestep.pipelining import ScheduleDualPipeV as ScheduleDualPipeV
from wholestep.pipelining import ScheduleGPipe as ScheduleGPipe
from wholestep.pipelining import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
from wholestep.pipelining import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
from wholestep.pipelining import ScheduleLoopedBFS as ScheduleLoopedBFS
from wholestep.pipelining import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
from wholestep.pipelining import SplitPoint as SplitPoint
from wholestep.pipelining import annotate_split_points as annotate_split_points
from wholestep.pipelining import build_stage as build_stage
from wholestep.pipelining import pipe_split as pipe_split
from wholestep.pipelining import pipeline as pipeline
from wholestep.pipelining import split_into_equal_size as split_into_equal_size
from wholestep.pipelining import split_on_size_threshold as split_on_size_threshold

__all__ = [
    "Pipe",
    "PipeSplitWrapper",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "annotate_split_points",
    "build_stage",
    "pipe_split",
    "pipeline",
    "split_into_equal_size",
    "split_on_size_threshold",
]

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining", globals())
