"""Environments as other people write them: nothing in here knows of headgate."""
