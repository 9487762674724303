"""Any model cut into stages, every value routed. Stages and schedules of torch that run them are here too."""

from torch.distributed.pipelining import PipelineStage as PipelineStage
from torch.distributed.pipelining import Schedule1F1B as Schedule1F1B
from torch.distributed.pipelining import ScheduleDualPipeV as ScheduleDualPipeV
from torch.distributed.pipelining import ScheduleGPipe as ScheduleGPipe
from torch.distributed.pipelining import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
from torch.distributed.pipelining import ScheduleLoopedBFS as ScheduleLoopedBFS
from torch.distributed.pipelining import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TensorChunkSpec
from torch.distributed.pipelining.microbatch import merge_chunks as merge_chunks
from torch.distributed.pipelining.schedules import PipelineScheduleMulti as PipelineScheduleMulti
from torch.distributed.pipelining.schedules import PipelineScheduleSingle as PipelineScheduleSingle
from torch.distributed.pipelining.schedules import get_schedule_class as get_schedule_class

from wholestep.pipelining.build.backward import stage_backward as stage_backward
from wholestep.pipelining.build.backward import stage_backward_input as stage_backward_input
from wholestep.pipelining.build.backward import stage_backward_weight as stage_backward_weight
from wholestep.pipelining.build.detach import DetachExecutor as DetachExecutor
from wholestep.pipelining.build.frontend import pipeline as pipeline
from wholestep.pipelining.build.loss import LossWrapper as LossWrapper
from wholestep.pipelining.build.loss import TrivialLossWrapper as TrivialLossWrapper
from wholestep.pipelining.build.markers import PipeSplitWrapper as PipeSplitWrapper
from wholestep.pipelining.build.markers import SplitPoint as SplitPoint
from wholestep.pipelining.build.markers import annotate_split_points as annotate_split_points
from wholestep.pipelining.build.markers import pipe_split as pipe_split
from wholestep.pipelining.build.modulewise import split_modules as split_modules
from wholestep.pipelining.build.policies import split_into_equal_size as split_into_equal_size
from wholestep.pipelining.build.policies import split_on_size_threshold as split_on_size_threshold
from wholestep.pipelining.build.routing import Routing as Routing
from wholestep.pipelining.build.routing import Value as Value
from wholestep.pipelining.build.sequential import PipeSequential as PipeSequential
from wholestep.pipelining.build.shared import MultiUseParameterConfig as MultiUseParameterConfig
from wholestep.pipelining.build.shared import SharedParameter as SharedParameter
from wholestep.pipelining.info import PipeInfo as PipeInfo
from wholestep.pipelining.pipe import Pipe as Pipe
from wholestep.pipelining.planning.balance import Balance as Balance
from wholestep.pipelining.planning.plan import Choice as Choice
from wholestep.pipelining.planning.plan import Plan as Plan
from wholestep.pipelining.planning.plan import plan as plan
from wholestep.pipelining.run.chunks import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
from wholestep.pipelining.run.clip import clip_grad_norm_ as clip_grad_norm_
from wholestep.pipelining.run.saving import load_stage as load_stage
from wholestep.pipelining.run.saving import save_stage as save_stage
from wholestep.pipelining.run.schedules import schedule as schedule
from wholestep.pipelining.run.stage import Stage as Stage
from wholestep.pipelining.run.stage_building import build_stage as build_stage
from wholestep.simulate.cost_model import Machine as Machine

__all__ = [
    "Balance",
    "Choice",
    "DetachExecutor",
    "LossWrapper",
    "Machine",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Plan",
    "Routing",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SharedParameter",
    "SplitPoint",
    "Stage",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "Value",
    "annotate_split_points",
    "build_stage",
    "clip_grad_norm_",
    "get_schedule_class",
    "load_stage",
    "merge_chunks",
    "pipe_split",
    "pipeline",
    "plan",
    "save_stage",
    "schedule",
    "split_args_kwargs_into_chunks",
    "split_into_equal_size",
    "split_modules",
    "split_on_size_threshold",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
