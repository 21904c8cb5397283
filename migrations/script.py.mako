"""${message}

Revision: ${up_revision}, after ${down_revision | comma,n}; created ${create_date}.

Gateways of the build before go on working on these tables while this one starts: add tables, indices, and columns that may be NULL
or have a server default. What is not used any more is dropped by a later build, when no process that uses it can run.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def _bounded() -> None:
    """Running processes wait behind a migration that waits for a lock: it gives up soon, and is begun again."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '2s'")
        op.execute("SET LOCAL statement_timeout = '15min'")


def upgrade() -> None:
    _bounded()
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    _bounded()
    ${downgrades if downgrades else "pass"}
