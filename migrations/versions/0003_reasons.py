"""Reasons that can be queried, deadlines of leases, and rewards of single calls.

Revision: 0003, after 0002; created 2026-11-21 22:10:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("calls", sa.Column("reward", sa.Float(), nullable=True))
    op.add_column("leases", sa.Column("deadline", sa.Float(), nullable=True))
    op.execute("UPDATE leases SET deadline = created_at")
    with op.batch_alter_table("leases") as batch:
        batch.alter_column("deadline", existing_type=sa.Float(), nullable=False)
    op.create_table(
        "decisions",
        sa.Column(
            "seq",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("group_id", sa.String(length=255), nullable=False),
        sa.Column("episode_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=255), nullable=False),
        sa.Column("buffer", sa.Integer(), nullable=True),
        sa.Column("entry", sa.Integer(), nullable=True),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_decisions"),
    )
    op.create_index("ix_decisions_group", "decisions", ["group_id"])
    op.create_index("ix_decisions_episode", "decisions", ["episode_id"])
    op.create_index("ix_decisions_buffer", "decisions", ["model", "buffer"])


def downgrade() -> None:
    op.drop_table("decisions")
    with op.batch_alter_table("leases") as batch:
        batch.drop_column("deadline")
    with op.batch_alter_table("calls") as batch:
        batch.drop_column("reward")
