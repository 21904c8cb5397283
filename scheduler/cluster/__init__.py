"""A cluster from one file (`scheduler run`).

`file` reads the file, `tags` places processes on nodes, `launch` is the interface to the nodes (`machine`, `ray`), `supervisor`
starts, supervises and stops the processes.
"""
