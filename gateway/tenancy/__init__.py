"""Tenants: projects and their keys, and the concurrent use by one key."""
