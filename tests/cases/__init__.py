"""The parity cases: one file per group of features, each ending in an explicit list named CASES."""
