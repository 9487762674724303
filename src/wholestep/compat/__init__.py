"""Names and paths of removed and of other libraries, on the parts of wholestep: code moves over by changing a prefix.

    torch.distributed._spmd                     wholestep.compat.spmd
    functorch.compile                           wholestep.compat.functorch
    torch.fx.passes.split_module                wholestep.compat.fx.split_module
    torch.fx.passes.infra.partitioner           wholestep.compat.fx.partitioner
    torch.distributed.pipelining, pippy         wholestep.compat.pipelining

Nothing is implemented here that is of use elsewhere: these files rename, and adapt arguments and results.
"""
