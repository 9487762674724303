"""`step.warmup(*args)`: capture and compile what the first calls need, without running anything.

    step.warmup(model, optimizer, batch)
        1  the graph of the first call                    creates optimizer state
        2  stand-ins for what that graph would create     empty tensors, not written; step counts as they would be
        3  the graph of the calls after it, compiled
        4  the stand-ins are removed

A stand-in decides nothing silently: the second graph has guards like any other, so if a later call finds something else
than the stand-ins promised (a branch on a value, say), it is captured as it would be without a warm-up.
"""

from __future__ import annotations

from typing import Any

from wholestep.capture.results.state_after import state_after
from wholestep.cross_iteration import pending_updates
from wholestep.ir.user_objects.call_tree import leaves_of
from wholestep.refused_steps import CannotCaptureError
from wholestep.step import Executable, StepCall, needs_eager
from wholestep.torch_private.modes import mode_that_needs_eager


def warm_up(step: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Prepare a compiled step for a call and those after it. `fn`: its function."""
    mode = mode_that_needs_eager()
    if mode is not None:
        raise needs_eager(mode)
    call = StepCall(fn, args, kwargs, *leaves_of((args, kwargs)))
    pending_updates.suspend()
    try:
        step._take_plan(call)
        with state_after(_executable_for(step, call).captured):
            _executable_for(step, call)
    except CannotCaptureError as error:
        step._refusals.warn(step._name, step._calls, error.refusal)  # its calls will run as the plain function
    finally:
        pending_updates.resume()


def _executable_for(step: Any, call: StepCall) -> Executable:
    """The executable for a call, compiled if there is none; on several ranks, once all have one."""
    found = step._find(call.leaves, call.structure)
    if step._ranks is None:
        entry: Executable = (found or step._compile(call))[0]
    else:
        step._calls += 1
        entry = step._agree_on_executable(step._ranks, call, found)[0]
    return entry
