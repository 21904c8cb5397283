"""HTTP: `v1` for agents, `admin` for operators, `middleware`. A handler parses, calls one service, and renders."""
