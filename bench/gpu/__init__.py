"""Measures by one command, on a machine with a GPU: the tests marked `gpu`, the trainer alone, and five steps next to vLLM."""
