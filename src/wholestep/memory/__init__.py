"""How much memory a step needs, and what its backward computes again so that it needs less."""
