"""The proof of what a weight update promises: every token right, none lost, none doubled, no request failed."""
