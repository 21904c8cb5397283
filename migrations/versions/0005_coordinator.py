"""Stores which gateway process hosts the control program, with a fencing number that only grows.

Revision: 0005, after 0004; created 2026-11-22 05:05:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "coordinator",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("deadline", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_coordinator"),
    )


def downgrade() -> None:
    op.drop_table("coordinator")
