"""Metrics, warnings and what the terminal shows."""
