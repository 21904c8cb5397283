"""Where processes run: child processes on one machine (`local`)."""
