"""Agents and runs to copy from."""
