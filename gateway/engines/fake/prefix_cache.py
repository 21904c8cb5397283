"""The fake engine's prefix cache, which counts what it serves."""

from __future__ import annotations

from collections.abc import Sequence

CACHE_BLOCK = 16


class PrefixCache:
    """Blocks of prompts, by their salt, and the weights that computed them."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], str] = {}
        self.hits = 0
        self.stale_hits = 0
        """Cached blocks that were served although other weights had computed them."""

    def look_up(self, prompt: Sequence[int], salt: str, weights_id: str) -> int:
        """Cache the blocks of a prompt; return how many were cached."""
        key, before = hash(salt), self.hits
        for start in range(0, len(prompt) - CACHE_BLOCK + 1, CACHE_BLOCK):
            key = hash((key, *prompt[start : start + CACHE_BLOCK]))
            known = self._blocks.setdefault((salt, key), "")
            if known:
                self.hits += 1
                self.stale_hits += known != weights_id
            else:
                self._blocks[salt, key] = weights_id
        return self.hits - before

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
