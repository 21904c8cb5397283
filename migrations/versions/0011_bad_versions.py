"""Why a version of weights is bad.

Revision: 0011, after 0010; created 2026-11-22 21:40:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    words = sa.String(collation="C").with_variant(sa.Text(), "sqlite")
    op.add_column("versions", sa.Column("bad", words, nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    op.drop_column("versions", "bad")
