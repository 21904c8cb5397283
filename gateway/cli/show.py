"""`gateway staleness` and `gateway episodes why`: questions to a running gateway, answered as tables."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import AdminKey, Url, ask


def staleness(
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
    model: Annotated[str | None, typer.Option(help="A trained model. [default: the first]")] = None,
) -> None:
    """Show a running gateway's batches, the groups in them, waiting groups and recent losses."""
    from gateway.cli.tables import show_staleness

    show_staleness(ask(gateway, admin_key, lambda client: client.staleness(model)))


def why(
    episode_id: Annotated[str, typer.Argument(help="An episode, opened or refused.")],
    gateway: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = None,
) -> None:
    """Tell what became of an episode and its group, step by step, and why it was trained or not."""
    from gateway.cli.tables import show_why

    show_why(ask(gateway, admin_key, lambda client: client.why(episode_id)))
