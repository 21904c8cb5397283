"""The trainer: leases batches of episodes from a gateway, updates a model, publishes the weights.

Start reading at `loop/training_loop.py` (the loop as named steps) and `loop/run.py` (what it needs). It knows the gateway by its
client alone.
"""
