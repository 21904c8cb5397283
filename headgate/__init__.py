"""What headgate's programs share: types, errors, files, processes, and the client that agents and trainers use.

It imports neither the gateway, the trainer nor the scheduler: no server, no SQL, no torch (`headgate.weights.plugin` apart).
"""
