"""Fetches the images of a batch's episodes into the run's folder, where every rank reads them, and reports unusable ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headgate.types import Group
from trainer.data.images import names_in
from trainer.loop.feed import Feed
from trainer.model.vision import VisionInputs
from trainer.state.images import ImageFiles

_CONCURRENT = 8


class EpisodeImages:
    """The images of one run. Invariant: a stored image is not fetched again."""

    def __init__(
        self,
        feed: Feed,
        files: ImageFiles,
        vision_inputs: VisionInputs | None,
        notify: Callable[[str], None] = print,
    ) -> None:
        """`vision_inputs`: the trained model's; None: nothing is fetched. `notify` reports unusable images to the user."""
        self._feed = feed
        self._files = files
        self._inputs = vision_inputs
        self._notify = notify
        self._lengths: dict[str, int] = {}
        """The number of tokens of each image that was read."""

    async def fetch(self, groups: Sequence[Group]) -> frozenset[str]:
        """Fetch the images of groups, and return the hashes of those that are not usable as they were recorded."""
        inputs, names, slots = self._inputs, names_in(groups), asyncio.Semaphore(_CONCURRENT)
        if inputs is None:
            return frozenset()

        async def problem_of(name: str, tokens: int) -> str | None:
            async with slots:
                return await self._problem(inputs, name, tokens)

        problems = await asyncio.gather(*(problem_of(name, tokens) for name, tokens in names.items()))
        unusable = {name: why for name, why in zip(names, problems, strict=True) if why is not None}
        for name, why in unusable.items():
            self._notify(f"the image {name} {why}: no token of its episodes is trained")
        return frozenset(unusable)

    async def _problem(self, inputs: VisionInputs, name: str, tokens: int) -> str | None:
        """Return the reason why an image cannot be given to the model; None if it can."""
        if not await asyncio.to_thread(self._files.has, name):
            data = await self._feed.image(name)
            if data is None:
                return "is no longer stored by the gateway"
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
        """Remove the least recently used images beyond the limit. Nothing may be computed in the meantime."""
        await asyncio.to_thread(self._files.trim)
