"""Run a prepared graph on live objects: read inputs, execute, write back."""
