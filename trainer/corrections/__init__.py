"""Importance corrections, one file each."""
