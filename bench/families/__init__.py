"""The matrix of model families: tiny configs, and what the trainer makes of them (docs/topics/models-matrix.md)."""
