"""The model: loading, saving, and what it says of tokens."""
