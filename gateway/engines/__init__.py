"""Engines: servers that turn token ids into token ids. The seam is `base`; `vllm` and `sglang` adapt real ones, and `fake` is one
behind either API.
"""
