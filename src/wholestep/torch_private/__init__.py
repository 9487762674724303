"""Every private torch name that wholestep uses, by torch subsystem: what it is for, and the versions it was tried on.

Nothing else in wholestep reaches for a private name of torch. `tests/torch_private` has a contract test for each name,
so that a new release of torch shows by name what changed.
"""
