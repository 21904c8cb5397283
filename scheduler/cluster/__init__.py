"""Starts and tends the processes of a cluster.

A cluster, from one file (`scheduler run`): `file` is what it says, `tags` who goes where, `launch` the seam to the nodes
(`machine`, `ray`), `supervisor` everything that is started, tended and ended. Beneath it: child processes of one machine
(`local`), and children that answer in lines (`lines`).
"""
