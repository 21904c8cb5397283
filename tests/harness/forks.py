"""Processes that tests kill and start again, forked from one that has imported everything, so that a start costs no seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

LOADED = [
    "pytest",
    "uvicorn",
    "gateway.app",
    "renderers",
    "renderers.base",
    "transformers.models.auto.tokenization_auto",
    "trainer.run",
    "torch.utils.tensorboard",
    "transformers.models.qwen3.modeling_qwen3",
]


def forks() -> ForkServerContext:
    """The context for all of them: there is one server in a test session, and the first to start it says what it loads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context
