"""Stores the errors of agents and graders.

Revision: 0009, after 0008; created 2026-11-22 21:25:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    words = sa.String(collation="C").with_variant(sa.Text(), "sqlite")
    op.add_column("episodes", sa.Column("error", words, nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    # not in a batch: SQLite would rebuild the table, and with the old one every turn of its episodes would be deleted
    op.drop_column("episodes", "error")
