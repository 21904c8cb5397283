"""The commands of `trainer` besides `run`."""
