"""Tenants: projects and their keys, and what one key may use at once."""
