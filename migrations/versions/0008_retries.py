"""Stores which call answers a request whose retry was restarted.

Revision: 0008, after 0007; created 2026-11-22 15:40:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "retries",
        sa.Column("episode_id", _words(40), nullable=False),
        sa.Column("name", _words(32), nullable=False),
        sa.Column("call_id", _words(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name="fk_retries_episode_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("episode_id", "name", name="pk_retries"),
    )


def _words(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(collation="C").with_variant(sa.String(length=length), "sqlite")


def downgrade() -> None:
    op.drop_table("retries")
