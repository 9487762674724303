"""Make a failing graph small, in processes that may fail."""
