"""Steps of trainers with their figures; how long a call waited for an engine; an index of the events of machines.

Revision: 0016, after 0015; created 2026-11-25 03:20:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_MACHINES = sa.text("episode_id = '' AND group_id = ''")


def upgrade() -> None:
    op.create_table(
        "trainer_steps",
        sa.Column("model", _words(255), nullable=False),
        sa.Column("run", _words(255), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("folder", sa.String(collation="C").with_variant(sa.Text(), "sqlite"), nullable=False),
        sa.PrimaryKeyConstraint("model", "run", "step", name="pk_trainer_steps"),
    )
    op.add_column("calls", sa.Column("queued_s", sa.Float(), nullable=True))
    op.create_index(
        "ix_events_machines", "events", ["kind", "id"], postgresql_where=_MACHINES, sqlite_where=_MACHINES
    )


def _words(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(collation="C").with_variant(sa.String(length=length), "sqlite")


def downgrade() -> None:
    op.drop_index("ix_events_machines", "events")
    op.drop_column("calls", "queued_s")
    op.drop_table("trainer_steps")
