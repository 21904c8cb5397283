"""The commands of `trainer` except `run`."""
