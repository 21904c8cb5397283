"""The demo of an agent in daily use."""
