"""Passes of `torch.fx.passes` on `wholestep.partition`: `split_module` and `partitioner`."""
