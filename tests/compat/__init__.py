"""Programs that nobody here wrote, against the gateway: `make test-compat`. docs/topics/compatibility.md is what came of it."""
