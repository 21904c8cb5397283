"""Small agents, one for each kind of client. README.md lists them; each is a program of its own."""
