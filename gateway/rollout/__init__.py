"""What happens behind an open request: one call's life across pauses, the engines, and the change of their weights."""
