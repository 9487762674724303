"""Every private torch name that wholestep uses, by torch subsystem: what it is for, and the versions it was tried on.

No other package uses a private name of torch. `tests/torch_private` has a contract test for each name, so a new release
of torch fails the tests of the names that it changed.
"""
