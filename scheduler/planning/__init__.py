"""`scheduler plan`: the best split between rollout and training, from a measured profile or from a recorded run."""
