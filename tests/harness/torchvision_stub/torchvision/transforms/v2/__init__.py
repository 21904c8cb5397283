"""Its functions are in `functional`."""
