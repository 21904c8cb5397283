"""What truncated distributions kept, for each token of a node.

Revision: 0024, after 0023; created 2026-11-29 01:00:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("kept", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("nodes", "kept")
