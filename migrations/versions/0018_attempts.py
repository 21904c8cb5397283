"""The number of an episode's attempt, by which the key of a crashed one is refused.

Revision: 0018, after 0017; created 2026-11-28 01:40:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("episodes", sa.Column("attempt", sa.Integer(), nullable=False, server_default=sa.text("1")))


def downgrade() -> None:
    op.drop_column("episodes", "attempt")
