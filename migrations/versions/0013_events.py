"""The stream of events: what happened, in order, for those who watch.

Revision: 0013, after 0012; created 2026-11-23 21:00:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # AUTOINCREMENT: SQLite would otherwise give the id of a forgotten newest event out again.
    op.create_table(
        "events",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", _words(64), nullable=False),
        sa.Column("model", _words(255), nullable=False),
        sa.Column("episode_id", _words(40), nullable=False),
        sa.Column("group_id", _words(255), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sqlite_autoincrement=True,
    )


def _words(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(collation="C").with_variant(sa.String(length=length), "sqlite")


def downgrade() -> None:
    op.drop_table("events")
