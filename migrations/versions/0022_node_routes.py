"""The experts that the tokens of nodes went through.

Revision: 0022, after 0021; created 2026-11-28 13:55:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_routes",
        sa.Column("episode_id", _words(40), nullable=False),
        sa.Column("model", _words(255), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("layers", sa.Integer(), nullable=False),
        sa.Column("top_k", sa.Integer(), nullable=False),
        sa.Column("dtype", _words(8), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name="fk_node_routes_episode_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("episode_id", "model", "index", name="pk_node_routes"),
    )


def _words(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(collation="C").with_variant(sa.String(length=length), "sqlite")


def downgrade() -> None:
    op.drop_table("node_routes")
