"""Engines, trainers and policies in simulated time (docs/simulation.md)."""
