"""headgate's data plane: agents speak messages, engines speak tokens, and only this package translates."""
