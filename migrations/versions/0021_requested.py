"""The column of a call's requested parameters is called `requested`.

Revision: 0021, after 0020; created 2026-11-28 09:50:00.
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE calls RENAME COLUMN asked TO requested")  # codespell:ignore asked


def downgrade() -> None:
    op.execute("ALTER TABLE calls RENAME COLUMN requested TO asked")  # codespell:ignore asked
