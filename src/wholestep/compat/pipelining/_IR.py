"""`torch.distributed.pipelining._IR` (`pippy.IR`): models, marks, losses and the pipe."""

from wholestep.compat import forwarded_names
from wholestep.pipelining import DetachExecutor as DetachExecutor
from wholestep.pipelining import LossWrapper as LossWrapper
from wholestep.pipelining import MultiUseParameterConfig as MultiUseParameterConfig
from wholestep.pipelining import Pipe as Pipe
from wholestep.pipelining import PipeInfo as PipeInfo
from wholestep.pipelining import PipeSequential as PipeSequential
from wholestep.pipelining import PipeSplitWrapper as PipeSplitWrapper
from wholestep.pipelining import SplitPoint as SplitPoint
from wholestep.pipelining import TrivialLossWrapper as TrivialLossWrapper
from wholestep.pipelining import annotate_split_points as annotate_split_points
from wholestep.pipelining import pipe_split as pipe_split
from wholestep.pipelining import pipeline as pipeline
from wholestep.pipelining import stage_backward as stage_backward
from wholestep.pipelining.build.loss_and_backward import null_coalesce_accumulate as _null_coalesce_accumulate  # noqa: F401
from wholestep.pipelining.build.model_state import MultiUseParamSpec as MultiUseParamSpec
from wholestep.pipelining.pipe import get_submod_name as get_submod_name

PP_SUBMOD_PREFIX = get_submod_name(0).removesuffix("_0")

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining._IR", globals())
