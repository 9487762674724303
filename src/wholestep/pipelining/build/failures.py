"""What to say when export cannot capture a model: the line, the reason, and the split by modules that still works."""

from __future__ import annotations

import linecache
import os

import torch

import wholestep
from wholestep.errors import Location, PipelineCaptureError
from wholestep.pipelining.build.calls import Call
from wholestep.pipelining.build.modulewise import find_chain

_FOREIGN = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (torch.__file__, wholestep.__file__))


def capture_error(module: torch.nn.Module, call: Call, error: Exception) -> PipelineCaptureError:
    """The error for a model that export cannot capture."""
    chain = find_chain(module, call)
    location = location_of_error(error)
    fix = "write the line with tensor operators (torch.where, torch.cond)"
    if "not a known type" in str(error) or "pytree" in str(error):
        fix = "return and take tensors in tuples, lists and dictionaries (transformers: config.use_cache = False)"
    if "data-dependent" in str(error) and location is not None and "drop" in location.text:
        fix += "; a branch on torch.rand is captured where its probability is 0 (layerdrop=0.0)"
    if chain is None:
        fix += ", or write the stages as modules of your own: torch.distributed.pipelining.PipelineStage runs them"
    else:
        shown = ", ".join(map(repr, chain if len(chain) <= 6 else (*chain[:3], "...", *chain[-2:])))
        fix += f". Without capturing, the model can be cut between its submodules: split_modules(model, ...) of {shown}"
    return PipelineCaptureError(
        f"torch.export cannot turn {type(module).__name__} into one graph: {_first_lines(error)}",
        fix=fix,
        location=location,
    )


def location_of_error(error: BaseException) -> Location | None:
    """The deepest line of the user's code in a traceback."""
    found: Location | None = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((*_FOREIGN, "<")):  # "<": code that torch or dataclasses made
            text = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            found = Location(code.co_filename, trace.tb_lineno, code.co_name, text)
        trace = trace.tb_next
    return found


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}" if lines else type(error).__name__
