"""Values that the step's Python reads outside of tensors: attributes, containers, clocks, files, generators."""
