"""Text without lengths and in the order of its code points on PostgreSQL; what each writer committed last.

Revision: 0006, after 0005; created 2026-11-22 05:20:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TEXTS: dict[str, dict[str, int | None]] = {
    "episodes": {
        "id": 40, "key_hash": 64, "task_id": 255, "group_id": 255, "mode": 8, "model": 255, "state": 16, "reason": None,
        "agent": 255, "notice": 64,
    },
    "calls": {
        "id": 64, "episode_id": 40, "model": 255, "request_key": 64, "api": 16, "logprobs_mode": 32, "engine": 64,
        "finish_reason": 16,
    },
    "nodes": {"episode_id": 40, "model": 255, "mask_reason": 64, "call_id": 64},
    "exchanges": {"call_id": 64, "response": None},
    "answers": {"id": 64, "episode_id": 40, "api": 16, "model": 255, "previous": 64},
    "ledger_events": {"model": 255},
    "decisions": {"model": 255, "group_id": 255, "episode_id": 40, "kind": 16, "reason": 255},
    "leases": {"model": 255, "id": 40, "consumer": 255, "state": 16, "checkpoint": None, "reason": None},
    "versions": {"model": 255, "path": None, "state": 16},
    "coordinator": {"name": 16, "holder": 64, "url": None},
}  # fmt: skip
"""The former lengths of VARCHAR columns (None: TEXT), which SQLite does not enforce."""


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        _alter({table: dict.fromkeys(columns, 'VARCHAR COLLATE "C"') for table, columns in _TEXTS.items()})
    op.create_table(
        "writers",
        sa.Column(
            "id", sa.String(collation="C").with_variant(sa.String(length=40), "sqlite"), nullable=False
        ),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_writers"),
    )


def downgrade() -> None:
    """Fail, and change nothing, where a text is longer than its column was."""
    op.drop_table("writers")
    if op.get_bind().dialect.name == "postgresql":
        _alter(
            {
                table: {name: f"VARCHAR({n})" if n else "TEXT" for name, n in columns.items()}
                for table, columns in _TEXTS.items()
            }
        )


def _alter(types: dict[str, dict[str, str]]) -> None:
    """One statement for each table, which is rebuilt once."""
    for table, columns in types.items():
        changes = ", ".join(
            f'ALTER COLUMN "{name}" TYPE {kind}' + ("" if "COLLATE" in kind else ' COLLATE "default"')
            for name, kind in columns.items()
        )
        op.execute(f"ALTER TABLE {table} {changes}")
