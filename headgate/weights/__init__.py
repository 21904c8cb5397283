"""Published weights: form on disk, servers, mirrors, deltas, adapters, and the plugin in vLLM (docs/topics/weights.md)."""
