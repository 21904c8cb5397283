"""Trials of versions on a share of the new conversations.

Revision: 0026, after 0025; created 2026-11-29 11:00:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from gateway.store.columns import AnyText

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "canaries",
        sa.Column("model", AnyText(255), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("live", sa.Integer(), nullable=False),
        sa.Column("share", sa.Float(), nullable=False),
        sa.Column("conversations", sa.Integer(), nullable=False),
        sa.Column("low", sa.Float(), nullable=False),
        sa.Column("high", sa.Float(), nullable=False),
        sa.Column("began_at", sa.Float(), nullable=False),
        sa.Column("held", sa.Boolean(), nullable=False),
        sa.Column("outcome", AnyText(16), nullable=False, server_default=""),
        sa.Column("why", AnyText(), nullable=False, server_default=""),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("figures", sa.JSON(none_as_null=True), nullable=True),
    )


def downgrade() -> None:
    op.drop_table("canaries")
