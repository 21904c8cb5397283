"""What is hot, shared between gateway processes, and may be lost at any moment."""
