"""`torch.distributed.pipelining.schedules`: torch's own schedules, and ours that says more when something is wrong."""

from wholestep.compat import forwarded_names
from wholestep.pipelining import PipelineScheduleMulti as PipelineScheduleMulti
from wholestep.pipelining import PipelineScheduleSingle as PipelineScheduleSingle
from wholestep.pipelining import Schedule1F1B as Schedule1F1B
from wholestep.pipelining import ScheduleDualPipeV as ScheduleDualPipeV
from wholestep.pipelining import ScheduleGPipe as ScheduleGPipe
from wholestep.pipelining import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
from wholestep.pipelining import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
from wholestep.pipelining import ScheduleLoopedBFS as ScheduleLoopedBFS
from wholestep.pipelining import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
from wholestep.pipelining import get_schedule_class as get_schedule_class
from wholestep.pipelining import schedule as schedule

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
    "schedule",
]

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining.schedules", globals())
