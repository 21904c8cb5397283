"""headgate's tests: unit (pure), integration (the gateway with the fake engine), acceptance (real vLLM)."""
