"""The training loop: leases, groups, nodes, replay and the processes around it."""
