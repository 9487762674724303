"""`torch.distributed.pipelining._backward`: the backward of a stage, whole or in two halves."""

from wholestep.compat import forwarded_names
from wholestep.pipelining import stage_backward as stage_backward
from wholestep.pipelining import stage_backward_input as stage_backward_input
from wholestep.pipelining import stage_backward_weight as stage_backward_weight
from wholestep.pipelining.build.loss_and_backward import null_coalesce_accumulate as _null_coalesce_accumulate  # noqa: F401

__getattr__, __dir__ = forwarded_names("torch.distributed.pipelining._backward", globals())
