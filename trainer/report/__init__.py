"""Metrics, warnings, samples, trackers, and what the terminal shows."""
