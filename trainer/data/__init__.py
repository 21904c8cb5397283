"""From recorded episodes to micro-batches of tokens."""
