"""Graphs and tensors as files: versioned JSON and safetensors, read without pickle, eval or import."""
