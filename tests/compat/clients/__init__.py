"""One file per client. They run in its environment, where headgate is not installed: standard library, pytest, the client."""
