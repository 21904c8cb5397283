"""The oldest build that works on the tables, so that one which does not know the newest revision can find out.

Revision: 0014, after 0013; created 2026-11-24 08:10:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "compatibility",
        sa.Column(
            "oldest",
            sa.String(collation="C").with_variant(sa.String(length=16), "sqlite"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("oldest", name="pk_compatibility"),
    )


def downgrade() -> None:
    op.drop_table("compatibility")
