"""Several gateway processes on one store: which of them decides, and how the others follow it."""
