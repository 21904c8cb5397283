"""The folder that an engine's process has on its PYTHONPATH, so that vLLM finds `headgate_transfer` as a plugin."""
