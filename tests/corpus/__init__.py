"""Real training steps of other people's models, optimizers and recipes, each held to eager (`make corpus`)."""
