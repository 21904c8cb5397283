"""Runs requests in engines: replies and retries, the life of a call, the pool of engines, and upstream models."""
