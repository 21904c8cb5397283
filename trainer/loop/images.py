"""Fetches the images of a batch's episodes into the run's folder, where every rank finds them, and says which cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.types import Group
from trainer.data.images import names_in
from trainer.loop.feed import Feed
from trainer.model.vision import VisionInputs
from trainer.state.images import ImageFiles

_AT_ONCE = 8


class EpisodeImages:
    """The images of one run. Invariant: an image that is there is not fetched again."""

    def __init__(
        self,
        feed: Feed,
        files: ImageFiles,
        vision_inputs: VisionInputs | None,
        say: Callable[[str], None] = print,
    ) -> None:
        """`vision_inputs`: the trained model's; None: nothing is fetched. `say` tells the user of images that cannot be had."""
        self._feed = feed
        self._files = files
        self._inputs = vision_inputs
        self._say = say
        self._lengths: dict[str, int] = {}
        """The number of tokens of each image that was read."""

    async def fetch(self, groups: Sequence[Group]) -> frozenset[str]:
        """Fetches what is not there yet; answers the hashes of images that cannot be had as they were recorded."""
        inputs, names, turns = self._inputs, names_in(groups), asyncio.Semaphore(_AT_ONCE)
        if inputs is None:
            return frozenset()

        async def looked(name: str, tokens: int) -> str | None:
            async with turns:
                return await self._wrong(inputs, name, tokens)

        said = await asyncio.gather(*(looked(name, tokens) for name, tokens in names.items()))
        wrong = {name: why for name, why in zip(names, said, strict=True) if why is not None}
        for name, why in wrong.items():
            self._say(f"the image {name} {why}: no token of its episodes is trained")
        return frozenset(wrong)

    async def _wrong(self, inputs: VisionInputs, name: str, tokens: int) -> str | None:
        """The reason why an image cannot be given to the model; None if it can."""
        if not await asyncio.to_thread(self._files.has, name):
            data = await self._feed.image(name)
            if data is None:
                return "is not stored by the gateway any more"
            await asyncio.to_thread(self._files.write, name, data)
        if name not in self._lengths:
            try:
                self._lengths[name] = await asyncio.to_thread(inputs.tokens, name)
            except ValueError as error:
                return f"cannot be read ({error})"
        if (own := self._lengths[name]) != tokens:
            return f"is {own} tokens here and was {tokens} where it was sampled from"
        return None

    async def trim(self) -> None:
        """Removes images that were used longest ago beyond the bound; nothing is computed meanwhile."""
        await asyncio.to_thread(self._files.trim)
