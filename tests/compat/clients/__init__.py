"""One file per client. They run in the client's environment, where headgate is not installed: the standard library, pytest, the client."""
