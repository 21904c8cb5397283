"""Indices for a million turns, how many episodes there are of each kind, and the replies that conversations can go on from.

Revision: 0007, after 0006; created 2026-11-22 05:40:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_BY = {"state": "state", "mode": "mode", "model": "model", "task": "task_id", "agent": "agent"}
"""The columns by which people list episodes, the newest first."""


def upgrade() -> None:
    _episodes()
    _calls()
    _decisions()
    op.create_index("ix_ledger_events_model", "ledger_events", ["model", "seq"])
    _index_of_some("ix_answers_previous", "answers", ["previous"], "previous <> ''")
    op.create_table(
        "tallies",
        *(sa.Column(name, _words(length), nullable=False) for name, length in _KEY.items()),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(*_KEY, name="pk_tallies"),
    )
    key = ", ".join(_KEY)
    op.execute(f"INSERT INTO tallies ({key}, count) SELECT {key}, count(*) FROM episodes GROUP BY {key}")


def _episodes() -> None:
    op.drop_index("ix_episodes_created", "episodes")
    op.create_index("ix_episodes_created", "episodes", ["created_at", "id"])
    op.create_index("ix_episodes_closed", "episodes", ["closed_at", "id"])
    for name, column in _BY.items():
        op.create_index(f"ix_episodes_{name}", "episodes", [column, "created_at", "id"])
    _index_of_some("ix_episodes_unfinished", "episodes", ["id"], "state <> 'closed'")


def _calls() -> None:
    """Add a partial index: one on all digests also found the replies of closed episodes, which may be many."""
    op.add_column("calls", sa.Column("open_to", _words(255), nullable=True))
    op.execute(
        "UPDATE calls SET open_to = (SELECT agent FROM episodes WHERE episodes.id = calls.episode_id) WHERE episode_id IN"
        " (SELECT id FROM episodes WHERE state = 'open' AND agent <> '')"
    )
    op.drop_index("ix_calls_digest", "calls")
    op.drop_index("ix_calls_episode", "calls")  # that of the request keys begins with the same column
    where = sa.text("open_to IS NOT NULL")
    op.create_index(
        "ix_calls_open", "calls", ["open_to", "digest"], postgresql_where=where, sqlite_where=where
    )


def _decisions() -> None:
    op.drop_index("ix_decisions_group", "decisions")
    op.create_index("ix_decisions_group", "decisions", ["group_id", "episode_id"])
    op.drop_index("ix_decisions_buffer", "decisions")
    _index_of_some("ix_decisions_trained", "decisions", ["model", "buffer", "entry"], "kind = 'trained'")
    _index_of_some("ix_decisions_alone", "decisions", ["at"], "kind IN ('refused', 'deleted')")


def _index_of_some(name: str, table: str, columns: list[str], where: str) -> None:
    rows = sa.text(where)
    op.create_index(name, table, columns, postgresql_where=rows, sqlite_where=rows)


_KEY = {"model": 255, "mode": 8, "state": 16, "reason": None}


def _words(length: int | None) -> sa.types.TypeEngine[str]:
    kept = sa.Text() if length is None else sa.String(length=length)
    return sa.String(collation="C").with_variant(kept, "sqlite")


def downgrade() -> None:
    op.drop_table("tallies")
    op.drop_index("ix_answers_previous", "answers")
    op.drop_index("ix_ledger_events_model", "ledger_events")
    for name in ("ix_decisions_alone", "ix_decisions_trained", "ix_decisions_group"):
        op.drop_index(name, "decisions")
    op.create_index("ix_decisions_group", "decisions", ["group_id"])
    op.create_index("ix_decisions_buffer", "decisions", ["model", "buffer"])
    op.drop_index("ix_calls_open", "calls")
    op.create_index("ix_calls_episode", "calls", ["episode_id"])
    op.create_index("ix_calls_digest", "calls", ["digest"])
    # not in a batch: SQLite would rebuild the table, and with the old one every exchange of its calls would be deleted
    op.drop_column("calls", "open_to")
    for name in (*_BY, "unfinished", "closed", "created"):
        op.drop_index(f"ix_episodes_{name}", "episodes")
    op.create_index("ix_episodes_created", "episodes", ["created_at"])
