"""HTTP: one file per group of routes. A handler parses, calls one service and renders; it decides nothing."""
