"""What only a GPU can show, by one command: the tests marked `gpu`, the trainer alone, and five steps beside vLLM."""
