"""`functorch.compile` under one prefix: every name is that of `wholestep.compilers`.

from wholestep.compat.functorch import aot_function, memory_efficient_fusion, minifier, nop, ts_compile

Names that torch does well are torch's own there (`default_partition`, `make_boxed_func`, ...); those and `minifier` are
loaded at first use.
"""

import importlib
from typing import Any

from wholestep import compilers
from wholestep.compilers import aot_function as aot_function
from wholestep.compilers import aot_module as aot_module
from wholestep.compilers import debug_compile as debug_compile
from wholestep.compilers import debug_nop as debug_nop
from wholestep.compilers import draw_graph as draw_graph
from wholestep.compilers import draw_graph_compile as draw_graph_compile
from wholestep.compilers import get_inputs as get_inputs
from wholestep.compilers import memory_efficient_fusion as memory_efficient_fusion
from wholestep.compilers import nnc_jit as nnc_jit
from wholestep.compilers import nop as nop
from wholestep.compilers import print_compile as print_compile
from wholestep.compilers import simple_ts_compile as simple_ts_compile
from wholestep.compilers import ts_compile as ts_compile

compiled_function = aot_function
compiled_module = aot_module


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in compilers.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(compilers, name)


def __dir__() -> list[str]:
    theirs = [name for name in dir(importlib.import_module("functorch.compile")) if not name.startswith("_")]
    return sorted({*globals(), *theirs})
