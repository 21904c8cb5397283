"""A model trained through an environment that headgate knows nothing of."""
