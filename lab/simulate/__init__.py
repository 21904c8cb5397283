"""Engines, trainers and policies in simulated time (lab/notes/simulation.md)."""
