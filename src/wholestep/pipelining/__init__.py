"""Pipeline parallelism: cut any model into stages and route every value, with torch's schedules to run them."""

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

from wholestep.pipelining.build.capture import split_modules as split_modules
from wholestep.pipelining.build.loss_and_backward import DetachExecutor as DetachExecutor
from wholestep.pipelining.build.loss_and_backward import LossWrapper as LossWrapper
from wholestep.pipelining.build.loss_and_backward import TrivialLossWrapper as TrivialLossWrapper
from wholestep.pipelining.build.loss_and_backward import stage_backward as stage_backward
from wholestep.pipelining.build.model_state import MultiUseParameterConfig as MultiUseParameterConfig
from wholestep.pipelining.build.model_state import SharedParameter as SharedParameter
from wholestep.pipelining.build.pipeline import pipeline as pipeline
from wholestep.pipelining.build.routing import RoutedValue as RoutedValue
from wholestep.pipelining.build.routing import Routing as Routing
from wholestep.pipelining.build.split_points import PipeSequential as PipeSequential
from wholestep.pipelining.build.split_points import PipeSplitWrapper as PipeSplitWrapper
from wholestep.pipelining.build.split_points import SplitPoint as SplitPoint
from wholestep.pipelining.build.split_points import annotate_split_points as annotate_split_points
from wholestep.pipelining.build.split_points import pipe_split as pipe_split
from wholestep.pipelining.build.split_points import split_into_equal_size as split_into_equal_size
from wholestep.pipelining.build.split_points import split_on_size_threshold as split_on_size_threshold
from wholestep.pipelining.pipe import Pipe as Pipe
from wholestep.pipelining.planning.balance import Balance as Balance
from wholestep.pipelining.planning.plan import Choice as Choice
from wholestep.pipelining.planning.plan import PipelinePlan as PipelinePlan
from wholestep.pipelining.planning.plan import plan as plan
from wholestep.pipelining.run.build_stage import PipeInfo as PipeInfo
from wholestep.pipelining.run.build_stage import build_stage as build_stage
from wholestep.pipelining.run.build_stage import clip_grad_norm_ as clip_grad_norm_
from wholestep.pipelining.run.microbatch_backward import stage_backward_input as stage_backward_input
from wholestep.pipelining.run.microbatch_backward import stage_backward_weight as stage_backward_weight
from wholestep.pipelining.run.save_stage import load_stage as load_stage
from wholestep.pipelining.run.save_stage import save_stage as save_stage
from wholestep.pipelining.run.schedules import schedule as schedule
from wholestep.pipelining.run.schedules import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
from wholestep.pipelining.run.stage import Stage as Stage
from wholestep.simulate.machine import Machine as Machine

Plan, Value = PipelinePlan, RoutedValue
"""Short names of these classes, which are exported here only."""

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
    "PipelinePlan",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Plan",
    "RoutedValue",
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
