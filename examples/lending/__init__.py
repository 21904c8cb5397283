"""Lending, shown on a real run: what a train node does while it waits, with and without it."""
