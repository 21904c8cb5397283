"""Programs that nobody here wrote, against the gateway: `make test-compat`. docs/compatibility.md is what came of it."""
