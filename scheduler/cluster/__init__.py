"""Where processes run: child processes on one machine (`local`), and children that answer in lines (`lines`)."""
