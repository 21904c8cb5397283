"""Child processes: how they are started, watched, started again and ended. Used by the gateway, the trainer and the scheduler.

Imports the standard library alone.
"""
