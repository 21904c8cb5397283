"""Measurements of this project. Every one prints a table for people and, as its last line, one JSON object (`report`)."""
