"""Faulty tool calls of a reply.

Revision: 0015, after 0014; created 2026-11-24 09:10:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_FAULTY = sa.text("tool_faults IS NOT NULL")


def upgrade() -> None:
    kind = sa.String(collation="C").with_variant(sa.String(length=64), "sqlite")
    op.add_column("calls", sa.Column("tool_faults", kind, nullable=True))
    op.create_index(
        "ix_calls_faulty", "calls", ["received_at"], postgresql_where=_FAULTY, sqlite_where=_FAULTY
    )


def downgrade() -> None:
    op.drop_index("ix_calls_faulty", "calls")
    op.drop_column("calls", "tool_faults")
