"""Stored answers for later requests, episodes that agents' keys open, and conversations that are known again.

Revision: 0004, after 0003; created 2026-11-22 01:50:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, length in (("agent", 255), ("notice", 64)):
        column = sa.Column(name, sa.String(length=length), nullable=False, server_default=sa.text("''"))
        op.add_column("episodes", column)
    op.create_index("ix_calls_digest", "calls", ["digest"])
    op.create_table(
        "answers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("episode_id", sa.String(length=40), nullable=False),
        sa.Column("api", sa.String(length=16), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("previous", sa.String(length=64), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("input", sa.JSON(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("deleted_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name="fk_answers_episode_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_answers"),
    )
    op.create_index("ix_answers_episode", "answers", ["episode_id", "created_at"])


def downgrade() -> None:
    op.drop_table("answers")
    op.drop_index("ix_calls_digest", "calls")
    # not in a batch: SQLite would rebuild the table, and with the old one every turn of its episodes would be deleted
    op.drop_column("episodes", "notice")
    op.drop_column("episodes", "agent")
