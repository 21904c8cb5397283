"""Stores the keys by which stored answers are listed, so that a list reads its own page alone.

The gateway fills in what older builds have stored (`answers.fill_in`), whenever it starts: they may store some afterwards too.

Revision: 0010, after 0009; created 2026-11-22 21:40:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_INDICES = {
    "ix_answers_agent": (["agent", "api", "created_at", "id"], "deleted_at IS NULL"),
    "ix_answers_unlisted": (["id"], "labels IS NULL"),
}


def upgrade() -> None:
    for name, length in (("agent", 255), ("asked_model", 255), ("labels", None)):  # codespell:ignore asked
        op.add_column("answers", sa.Column(name, _words(length), nullable=True))
    for name, (columns, where) in _INDICES.items():
        rows = sa.text(where)
        op.create_index(name, "answers", columns, postgresql_where=rows, sqlite_where=rows)


def _words(length: int | None) -> sa.types.TypeEngine[str]:
    kept = sa.Text() if length is None else sa.String(length=length)
    return sa.String(collation="C").with_variant(kept, "sqlite")


def downgrade() -> None:
    for name in _INDICES:
        op.drop_index(name, "answers")
    for name in ("agent", "asked_model", "labels"):  # codespell:ignore asked
        op.drop_column("answers", name)
