"""The images among the tokens of nodes; the files of images, and the episodes that have them.

Revision: 0017, after 0016; created 2026-11-26 03:30:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "images",
        sa.Column("hash", _words(64), nullable=False),
        sa.Column("media_type", _words(32), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_images"),
    )
    op.create_table(
        "image_uses",
        sa.Column("episode_id", _words(40), nullable=False),
        sa.Column("hash", _words(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"], ["episodes.id"], name="fk_image_uses_episode_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["hash"], ["images.hash"], name="fk_image_uses_hash"),
        sa.PrimaryKeyConstraint("episode_id", "hash", name="pk_image_uses"),
    )
    op.create_index("ix_image_uses_hash", "image_uses", ["hash"])
    op.add_column("nodes", sa.Column("images", sa.JSON(), nullable=True))


def _words(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(collation="C").with_variant(sa.String(length=length), "sqlite")


def downgrade() -> None:
    op.drop_column("nodes", "images")
    op.drop_index("ix_image_uses_hash", "image_uses")
    op.drop_table("image_uses")
    op.drop_table("images")
