"""The model: loading, saving, and log-probabilities of tokens."""
