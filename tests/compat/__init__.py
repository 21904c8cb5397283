"""Programs of other projects, against the gateway: `make test-compat` writes docs/topics/compatibility.md."""
