"""Sampling parameters that an episode sets for its calls.

Revision: 0012, after 0011; created 2026-11-23 14:40:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("episodes", sa.Column("sampling", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("episodes", "sampling")
