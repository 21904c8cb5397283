"""Engines: servers that turn token ids into token ids. `base` is the interface, `vllm` and `sglang` are adapters, and `fake` is
an engine with either API.
"""
