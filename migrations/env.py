"""Alembic's entry: migrates over the connection it is given, or to the URL in HEADGATE_STORE_URL."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection, create_engine

from gateway.store.models import Base


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    url = os.environ.get("HEADGATE_STORE_URL", "sqlite:///runs/headgate.db")
    with create_engine(url).begin() as opened:
        _run(opened)
