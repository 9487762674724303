"""wholestep: an ordinary PyTorch training step as one FX graph."""

from wholestep import compilers as compilers
from wholestep import debug as debug
from wholestep import errors as errors
from wholestep import inspect as inspect
from wholestep import lower as lower
from wholestep import passes as passes
from wholestep import pipelining as pipelining
from wholestep import simulate as simulate
from wholestep.errors import CudaGraphWarning as CudaGraphWarning
from wholestep.errors import EagerWarning as EagerWarning
from wholestep.errors import LowerWarning as LowerWarning
from wholestep.errors import RecompileWarning as RecompileWarning
from wholestep.errors import WholestepError as WholestepError
from wholestep.ir.step_graph import StepGraph as StepGraph
from wholestep.lower import partial_lower as partial_lower
from wholestep.options import Dim as Dim
from wholestep.options import Options as Options
from wholestep.parallel.plan import FullyShard as FullyShard
from wholestep.parallel.plan import Replicate as Replicate
from wholestep.partition import split_module as split_module
from wholestep.step import CompiledStep as CompiledStep
from wholestep.step import Executable as Executable
from wholestep.step import build as build
from wholestep.step import capture as capture
from wholestep.step import check as check
from wholestep.step import compile as compile

__version__ = "0.1.0.dev0"

__all__ = [
    "CompiledStep",
    "CudaGraphWarning",
    "Dim",
    "EagerWarning",
    "Executable",
    "FullyShard",
    "LowerWarning",
    "Options",
    "RecompileWarning",
    "Replicate",
    "StepGraph",
    "WholestepError",
    "build",
    "capture",
    "check",
    "compile",
    "compilers",
    "debug",
    "errors",
    "inspect",
    "lower",
    "partial_lower",
    "passes",
    "pipelining",
    "simulate",
    "split_module",
]
