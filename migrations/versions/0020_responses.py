"""Stored answers are responses alone: chat completions go, and the columns by which they were listed.

Revision: 0020, after 0019; created 2026-11-28 06:10:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_INDICES = {
    "ix_answers_agent": (["agent", "api", "created_at", "id"], "deleted_at IS NULL"),
    "ix_answers_unlisted": (["id"], "labels IS NULL"),
}
_COLUMNS = (("agent", 255), ("asked_model", 255), ("labels", None))  # codespell:ignore asked


def upgrade() -> None:
    op.execute("DELETE FROM answers WHERE api <> 'responses'")
    for name in _INDICES:
        op.drop_index(name, "answers")
    for name, _ in _COLUMNS:
        op.drop_column("answers", name)
    op.drop_column("answers", "api")


def downgrade() -> None:
    op.add_column("answers", sa.Column("api", _words(16), nullable=False, server_default="responses"))
    for name, length in _COLUMNS:
        op.add_column("answers", sa.Column(name, _words(length), nullable=True))
    for name, (columns, where) in _INDICES.items():
        rows = sa.text(where)
        op.create_index(name, "answers", columns, postgresql_where=rows, sqlite_where=rows)


def _words(length: int | None) -> sa.types.TypeEngine[str]:
    sqlite = sa.Text() if length is None else sa.String(length=length)
    return sa.String(collation="C").with_variant(sqlite, "sqlite")
