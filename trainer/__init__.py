"""The trainer: leases batches of episodes from a gateway, updates a model, publishes the weights.

Start reading at `run` (the loop as named steps). It knows the gateway by its client and its types alone.
"""
