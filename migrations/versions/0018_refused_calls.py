"""The calls of an episode that were refused before anything was sampled.

Revision: 0018, after 0017; created 2026-11-28 01:50:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "refused_calls",
        sa.Column("episode_id", _words(40), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("api", _words(16), nullable=False),
        sa.Column("model", _words(255), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("code", _words(64), nullable=False),
        sa.Column("message", _words(), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name="fk_refused_calls_episode_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("episode_id", "index", name="pk_refused_calls"),
    )


def _words(length: int | None = None) -> sa.types.TypeEngine[str]:
    sqlite = sa.Text() if length is None else sa.String(length=length)
    return sa.String(collation="C").with_variant(sqlite, "sqlite")


def downgrade() -> None:
    op.drop_table("refused_calls")
