"""Episodes: how they open, which calls are theirs, how they close, and how long they are kept."""
