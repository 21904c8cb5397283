"""A batch's number is called `batch`: in two columns, and in the stored JSON of the ledger and of its events.

Revision: 0023, after 0022; created 2026-11-28 17:15:00.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_NUMBER = [('"buffer":', '"batch":')]
_COMMANDS = [
    *_NUMBER,
    ('"from_buffer":', '"from_batch":'),
    ('"to_buffer":', '"to_batch":'),
    ('"type":"BufferReady"', '"type":"BatchReady"'),
    ('"type":"Late"', '"type":"OverBound"'),
]
_OF_LEDGER = "(kind LIKE 'batch.%' OR kind LIKE 'group.%' OR kind IN ('episode.admitted', 'episode.masked'))"
"""The events whose data is the ledger's: the data of others may have keys of a client."""
_NO_SETTINGS = """event{text} NOT LIKE '{{"type":"Settings"%'"""
"""In the settings, `batch` is the size of a batch."""


def upgrade() -> None:
    for table in ("decisions", "leases"):
        op.execute(f"ALTER TABLE {table} RENAME COLUMN buffer TO batch")
    _rename(_NUMBER, _COMMANDS)


def downgrade() -> None:
    for table in ("decisions", "leases"):
        op.execute(f"ALTER TABLE {table} RENAME COLUMN batch TO buffer")
    _rename(*([(new, old) for old, new in names] for names in (_NUMBER, _COMMANDS)))


def _rename(number: list[tuple[str, str]], commands: list[tuple[str, str]]) -> None:
    text, json = ("", "") if op.get_bind().dialect.name == "sqlite" else ("::text", "::json")
    for table, column, names, where in (
        ("ledger_events", "event", number, _NO_SETTINGS.format(text=text)),
        ("ledger_events", "commands", commands, f"commands{text} <> '[]'"),
        ("events", "data", number, _OF_LEDGER),
    ):
        value = f"{column}{text}"
        for old, new in names:
            value = f"replace({value}, '{old}', '{new}')"
        statement = f"UPDATE {table} SET {column} = ({value}){json} WHERE {where}"
        op.execute(sa.text(statement.replace(":", "\\:")))
