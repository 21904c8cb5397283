"""Weights from a trainer's process to the workers of engines, by collective operations of PyTorch.

Needs torch and blake3 alone, and nothing else of headgate: it also runs in vLLM's process, from its own folder.
"""
