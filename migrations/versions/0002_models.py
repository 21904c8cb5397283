"""Several models in one store, calls that a retry finds again, and what upstream models answered.

Revision: 0002, after 0001; created 2026-11-21 19:05:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_MODEL = sa.String(length=255)
_FORMER = "COALESCE((SELECT model FROM episodes ORDER BY created_at DESC LIMIT 1), '')"
"""A store had one model before this revision; its rows get the model's last name."""
_MODEL_OF = {
    "nodes": "(SELECT model FROM episodes WHERE episodes.id = nodes.episode_id)",
    "calls": "(SELECT model FROM episodes WHERE episodes.id = calls.episode_id)",
    "ledger_events": _FORMER,
    "leases": _FORMER,
    "versions": _FORMER,
}


def upgrade() -> None:
    for table, model in _MODEL_OF.items():
        op.add_column(table, sa.Column("model", _MODEL, nullable=True))
        op.execute(f"UPDATE {table} SET model = {model}")
    op.add_column("calls", sa.Column("request_key", sa.String(length=64), nullable=True))
    op.execute("UPDATE calls SET request_key = ''")
    with op.batch_alter_table("nodes") as batch:
        batch.alter_column("model", existing_type=_MODEL, nullable=False)
        batch.drop_constraint("pk_nodes", type_="primary")
        batch.create_primary_key("pk_nodes", ["episode_id", "model", "index"])
    with op.batch_alter_table("versions") as batch:
        batch.alter_column("model", existing_type=_MODEL, nullable=False)
        batch.drop_constraint("pk_versions", type_="primary")
        batch.create_primary_key("pk_versions", ["model", "version"])
    with op.batch_alter_table("calls") as batch:
        batch.alter_column("model", existing_type=_MODEL, nullable=False)
        batch.alter_column("request_key", existing_type=sa.String(length=64), nullable=False)
        batch.create_index("ix_calls_request_key", ["episode_id", "request_key"])
    with op.batch_alter_table("leases") as batch:
        batch.alter_column("model", existing_type=_MODEL, nullable=False)
        batch.drop_constraint("pk_leases", type_="primary")
        batch.create_primary_key("pk_leases", ["model", "fence"])
    with op.batch_alter_table("ledger_events") as batch:
        batch.alter_column("model", existing_type=_MODEL, nullable=False)
    op.create_table(
        "exchanges",
        sa.Column("call_id", sa.String(length=64), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name="fk_exchanges_call_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("call_id", name="pk_exchanges"),
    )


def downgrade() -> None:
    """Lose what other models sampled, and the ledgers of all but one model: the older tables have no place for them."""
    op.drop_table("exchanges")
    for table, model in _MODEL_OF.items():
        op.execute(f"DELETE FROM {table} WHERE model <> {model}")
    with op.batch_alter_table("nodes") as batch:
        batch.drop_constraint("pk_nodes", type_="primary")
        batch.create_primary_key("pk_nodes", ["episode_id", "index"])
        batch.drop_column("model")
    with op.batch_alter_table("versions") as batch:
        batch.drop_constraint("pk_versions", type_="primary")
        batch.create_primary_key("pk_versions", ["version"])
        batch.drop_column("model")
    with op.batch_alter_table("calls") as batch:
        batch.drop_index("ix_calls_request_key")
        batch.drop_column("request_key")
        batch.drop_column("model")
    with op.batch_alter_table("leases") as batch:
        batch.drop_constraint("pk_leases", type_="primary")
        batch.create_primary_key("pk_leases", ["fence"])
        batch.drop_column("model")
    with op.batch_alter_table("ledger_events") as batch:
        batch.drop_column("model")
