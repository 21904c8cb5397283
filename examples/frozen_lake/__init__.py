"""The demo on a lake: a model learns to cross gymnasium's FrozenLake, one tool call a step."""
