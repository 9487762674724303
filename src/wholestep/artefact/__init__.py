"""A captured step as a file: what capture found out, bound to other objects in another process without tracing."""
