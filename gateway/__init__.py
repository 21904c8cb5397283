"""headgate's data plane: agents send messages, engines use tokens, and only this package translates."""
