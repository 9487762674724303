"""Draw a graph as SVG, DOT or PNG."""
