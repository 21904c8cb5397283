"""Deletions of one caller's or one user's conversations.

Revision: 0025, after 0024; created 2026-11-29 11:00:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deletions",
        sa.Column("id", _words(40), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("done_at", sa.Float(), nullable=True),
        sa.Column("agent", _words(255), nullable=False),
        sa.Column("users", sa.JSON(), nullable=False),
        sa.Column("episodes", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deletions"),
    )


def _words(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(collation="C").with_variant(sa.String(length=length), "sqlite")


def downgrade() -> None:
    op.drop_table("deletions")
