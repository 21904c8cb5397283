"""The stored ledger: what is committed is the whole truth, at every moment; and it goes on under its own settings alone."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from sqlalchemy import event

from gateway.config import StalenessSettings, StoreSettings
from gateway.config.settings import ConfigError
from gateway.store import decisions, episodes, turns
from gateway.store import ledger as statements
from gateway.store.database import Database
from gateway.training_feed.batches import Batches
from gateway.training_feed.groups import GroupReader
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import LedgerListener, StoredLedger, check_settings, different
from headgate.errors import Conflict, NotFound, Unavailable
from headgate.rewards import ROUNDING, SIZE
from headgate.types import Node, TokenFlag
from scheduler.policies.staleness_events import Consume, Join, Leased, Publish, Reward
from tests.harness.waiting import turns as loop_turns
from tests.harness.waiting import within
from tests.unit.gateway.store.rows import MINE, call, episode, leases_of

# Settings


async def test_a_ledger_of_an_older_build_goes_on_under_the_defaults_of_new_keys(database: Database) -> None:
    old = {"type": "Settings", "eta": 1, "batch": 2, "min_members": 1}
    await database.submit(lambda c: statements.insert_event(c, "m", old, []))
    await check_settings(database, MINE, "m")
    ledger = await StoredLedger.load(database, MINE, "m")
    assert (ledger.rule.settings.batch, ledger.rule.settings.spare_groups) == (2, 0)
    assert (ledger.rule.settings.equal_within, ledger.rule.settings.equal_size) == (0.0, 0.0)
    with pytest.raises(ConfigError, match=r"spare_groups = 0 \(now 1\)"):
        await StoredLedger.load(database, MINE.model_copy(update={"spare_groups": 1}), "m")


async def test_other_settings_are_refused_by_name(database: Database) -> None:
    await StoredLedger.load(database, MINE, "m")
    for key, value in {
        "eta": 2, "batch": 3, "min_members": 2, "spare_groups": 1, "spare_members": 1, "drop_equal": True,
        "late_groups": "mask", "stuck_groups": 5,
    }.items():  # fmt: skip
        other = MINE.model_copy(update={key: value})
        for load in (StoredLedger.load, check_settings):
            with pytest.raises(ConfigError) as error:
                await load(database, other, "m")
            assert f"{key} = {getattr(MINE, key)!r} (now {value!r});" in str(error.value)
    await StoredLedger.load(database, MINE.model_copy(update={"eta": 2}), "another")


async def test_a_ledger_keeps_the_meaning_of_equal_rewards_that_it_was_begun_with(database: Database) -> None:
    """One of a build without `equal_size` had no floor; its replay must drop the groups that it dropped."""
    old = {"type": "Settings", "eta": 1, "batch": 2, "min_members": 1, "equal_within": 1e-6}
    await database.submit(lambda c: statements.insert_event(c, "old", old, []))
    for model, meant in (("old", (1e-6, 0.0)), ("m", (ROUNDING, SIZE)), ("m", (ROUNDING, SIZE))):
        limits = (await StoredLedger.load(database, MINE, model)).rule.settings
        assert (limits.equal_within, limits.equal_size) == meant


async def test_what_shapes_no_decision_may_change(database: Database) -> None:
    await StoredLedger.load(database, MINE, "m")
    await StoredLedger.load(database, MINE.model_copy(update={"on_stuck": "retry", "stuck_s": 5.0}), "m")


# Failures


async def test_a_store_that_is_too_far_behind_leaves_the_ledger_as_it_was(store_url: str) -> None:
    database = await Database.open(StoreSettings(url=store_url, max_pending=1))
    try:
        ledger = await StoredLedger.load(database, MINE, "m")
        pending = database.submit(lambda _: None)
        with pytest.raises(Unavailable, match="too many writes wait"):
            await ledger.apply(Join("g", "e", 1))
        assert ledger.rule.groups() == []
        await pending
        await ledger.apply(Join("g", "e", 1))
        assert [group.group_id for group in ledger.rule.groups()] == ["g"]
    finally:
        await database.close()


async def test_an_event_that_is_not_committed_breaks_the_ledger_also_without_a_waiter(
    database: Database,
) -> None:
    ledger = await StoredLedger.load(database, MINE, "m")

    def fails(_connection: Any) -> None:
        raise KeyError("disk full")

    waiting = asyncio.ensure_future(ledger.apply(Join("g", "e", 1), fails))
    await loop_turns(1)
    waiting.cancel()
    await database.settled()
    assert ledger.broken is not None
    with pytest.raises(Unavailable, match="restart the gateway"):
        await ledger.apply(Join("g", "f", 1))


async def test_a_batch_is_reported_after_the_commit_that_completed_it(database: Database) -> None:
    ledger = await StoredLedger.load(database, MINE.model_copy(update={"batch": 1}), "m")
    await ledger.apply(Join("g", "e", 1))
    listener, heard = Mock(LedgerListener), list[bool]()
    listener.batch_changed.side_effect = lambda _model: heard.append(ledger.rule.complete(0))
    ledger.subscribe(listener)
    writing, commit = threading.Event(), threading.Event()

    def write(_connection: Any) -> None:
        writing.set()
        assert commit.wait(60)

    waiting = asyncio.ensure_future(ledger.apply(Reward("e", 1.0), write))
    assert await asyncio.to_thread(writing.wait, 60)
    assert ledger.rule.complete(0), "it is decided"
    assert (heard, waiting.done()) == ([], False)
    commit.set()
    await waiting
    assert heard == [True]
    await ledger.apply(Join("h", "f", 1))
    assert heard == [True], "of no batch"


async def test_a_batch_that_was_not_committed_is_not_reported(database: Database) -> None:
    ledger = await StoredLedger.load(database, MINE, "m")
    listener = Mock(LedgerListener)
    ledger.subscribe(listener)

    def fails(_connection: Any) -> None:
        raise KeyError("disk full")

    with pytest.raises(KeyError):
        await ledger.apply(Leased(0), fails)
    listener.batch_changed.assert_not_called()


async def opened(url: str) -> tuple[Database, Leases]:
    """Return a database and its leases, opened as at a gateway's start."""
    database = await Database.open(StoreSettings(url=url))
    return database, await leases_of(database, await StoredLedger.load(database, MINE, "m"))


async def test_what_was_leased_and_trained_is_known_after_a_restart(database: Database) -> None:
    """Lending nodes depends on it."""
    ledger = await StoredLedger.load(database, MINE, "m")
    for number in range(MINE.batch):
        await ledger.apply(Join(f"g{number}", f"e{number}", 1))
        await ledger.apply(Reward(f"e{number}", 1.0))
    for event_ in (Leased(0), Consume(0), Leased(1)):
        await ledger.apply(event_)
    again = await StoredLedger.load(database, MINE, "m")
    assert (again.leased, again.trained) == (1, 0)


async def test_a_lease_goes_on_after_a_restart_until_its_own_deadline(store_url: str) -> None:
    database, first = await opened(store_url)
    lease = await first.lease("trainer")
    await database.close()
    database, second = await opened(store_url)
    await second.renew(lease.lease_id, lease.fence)
    with pytest.raises(Conflict, match="leased to 'trainer'"):
        await second.lease("another")
    held = second.current()
    assert held is not None
    assert 0 < held["left_s"] <= 1000.0
    await database.submit(lambda c: c.exec_driver_sql("UPDATE leases SET deadline = deadline - 5000"))
    await database.close()
    database, third = await opened(store_url)
    with pytest.raises(Conflict, match="not renewed in time"):
        await third.renew(lease.lease_id, lease.fence)
    following = await third.lease("another")
    assert following.fence > lease.fence
    rows = await database.read(
        lambda c: c.exec_driver_sql("SELECT fence, state FROM leases ORDER BY fence").all()
    )
    assert [tuple(row) for row in rows] == [(lease.fence, "expired"), (following.fence, "held")]
    await database.close()


async def test_a_batch_that_is_passed_over_ends_its_lease(database: Database) -> None:
    ledger = await StoredLedger.load(database, MINE, "m")
    leases = await leases_of(database, ledger)
    lease = await leases.lease("trainer")
    await ledger.apply(Publish(1))
    assert leases.current() is None
    with pytest.raises(NotFound, match="batch 0 was passed over, the next to train is 1") as error:
        await leases.renew(lease.lease_id, lease.fence)
    assert error.value.code == "no_lease"
    another = await leases.lease("another")
    assert (another.batch, another.fence > lease.fence) == (1, True)
    states = await database.read(lambda c: c.exec_driver_sql("SELECT state FROM leases ORDER BY fence").all())
    assert [state for (state,) in states] == ["skipped", "held"]


async def test_a_ledger_reads_no_more_than_its_own_models_events(database: Database) -> None:
    one = await StoredLedger.load(database, MINE, "m")
    await one.apply(Join("g", "e", 1))
    await one.apply(Reward("e", 1.0))
    other = await StoredLedger.load(database, MINE, "n")
    assert other.rule.groups() == []
    with pytest.raises(ValueError, match="not complete"):
        await one.apply(Consume(0))


async def test_what_a_batch_was_not_trained_on_is_not_read_by_the_writer(database: Database) -> None:
    """An acknowledgment needs that of each episode; all other writes would wait until a whole batch is read."""
    ledger = await StoredLedger.load(database, MINE, "m")
    leases = await leases_of(database, ledger)
    nodes = [
        Node(
            n, -1, 0, True, np.ones(3, np.int32), np.ones(3, np.float32), np.zeros(3, np.int32),
            np.full(3, TokenFlag.TRUNCATED, np.uint8), 1.0, reason, f"c{n}",
        )
        for n, reason in enumerate(["", "greedy", ""])
    ]  # fmt: skip
    for number in range(MINE.batch):
        await ledger.apply(Join(f"g{number}", f"e{number}", 1))
        await database.submit(
            partial(_episode_of, values=episode(f"e{number}"), nodes=nodes if number == 0 else [])
        )
        await ledger.apply(Reward(f"e{number}", 1.0))
    lease = await leases.lease("trainer")
    read: list[str] = []

    def listen(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if threading.current_thread().name == "database-writer" and statement.startswith("SELECT"):
            read.append(statement)

    event.listen(database._engine, "before_cursor_execute", listen)
    await leases.ack(lease.lease_id, lease.fence, "checkpoint")
    assert not [statement for statement in read if "nodes" in statement]
    found = await database.read(lambda c: decisions.of_episode(c, "e0"))
    masked = [row for row in found if row["kind"] == "masked"]
    assert [(row["reason"], row["details"]["tokens"]) for row in masked] == [("greedy", 3), ("truncated", 6)]


async def test_a_batch_is_leased_as_it_grows_and_read_again_as_it_was_trained(database: Database) -> None:
    ledger = await StoredLedger.load(database, MINE, "m")
    leases = await leases_of(database, ledger)
    given = []
    for batch in range(2):
        lease = await leases.lease("trainer")
        first, second = [f"{batch}{number}" for number in range(MINE.batch)]
        await _rewarded(database, ledger, first)
        begun = await leases.groups(lease.lease_id, lease.fence, 0, 0.0)
        assert ([group.group_id for group in begun.groups], begun.complete) == ([first], False)
        rest = asyncio.create_task(leases.groups(lease.lease_id, lease.fence, begun.cursor, 60.0))
        await loop_turns()
        assert not rest.done()
        await _rewarded(database, ledger, second)
        async with within("the rest of the batch comes"):
            ended = await rest
        assert ([group.group_id for group in ended.groups], ended.complete) == ([second], True)
        await leases.ack(lease.lease_id, lease.fence, "checkpoint")
        given.append(begun.groups + ended.groups)
    batches = Batches(database, GroupReader("m", MINE))
    assert [(row["batch"], row["groups"]) for row in await batches.list()] == [(0, 2), (1, 2)]
    for batch, groups in enumerate(given):
        assert await batches.groups(batch) == groups
    with pytest.raises(NotFound) as missing:
        await batches.groups(2)
    assert missing.value.code == "no_batch"
    await database.submit(lambda c: c.exec_driver_sql("DELETE FROM episodes WHERE id = '00'"))
    with pytest.raises(NotFound, match="1 of these 2 episodes were deleted") as deleted:
        await batches.groups(0)
    assert deleted.value.code == "episodes_deleted"
    assert await batches.groups(1) == given[1]


async def test_a_response_that_ended_a_lease_may_come_again_and_no_other_one(database: Database) -> None:
    leases = await leases_of(database, await StoredLedger.load(database, MINE, "m"))
    lease = await leases.lease("trainer")
    with pytest.raises(Conflict) as fenced:
        await leases.nack(lease.lease_id, lease.fence + 1, "")
    assert fenced.value.code == "fenced"
    await leases.nack(lease.lease_id, lease.fence, "no memory")
    await leases.nack(lease.lease_id, lease.fence, "no memory")
    with pytest.raises(NotFound) as over:
        await leases.ack(lease.lease_id, lease.fence, "checkpoint")
    assert over.value.code == "no_lease"
    rows = await database.read(lambda c: c.exec_driver_sql("SELECT state, reason FROM leases").all())
    assert [tuple(row) for row in rows] == [("nacked", "no memory")]


async def _rewarded(database: Database, ledger: StoredLedger, name: str) -> None:
    """Add a group with one rewarded episode, both of this name."""
    await ledger.apply(Join(name, name, 1))
    row = episode(name, group_id=name, reward=1.0, state="rewarded")
    await database.submit(lambda c: episodes.insert_episode(c, row))
    await ledger.apply(Reward(name, 1.0))


def _episode_of(connection: Any, values: dict[str, Any], nodes: list[Node]) -> None:
    episodes.insert_episode(connection, values)
    for node in nodes:
        turns.insert_turns(connection, [([node], call(node.call_id, values["id"], node=node.index))])


@pytest.mark.parametrize(
    ("begun", "now", "differing"),
    [
        ({"rule": "staleflow", "late": "cancel"}, {"late_groups": "cancel"}, {}),
        ({"rule": "verl", "late": "mask"}, {"late_groups": "overtake"}, {}),
        ({"rule": "verl", "late": "mask"}, {"late_groups": "mask"}, {"late_groups": ("overtake", "mask")}),
        ({"rule": "roll", "late": "cancel"}, {"late_groups": "cancel"}, {"rule": ("roll", None)}),
    ],
)
def test_a_ledger_of_a_build_with_a_choice_of_rules_is_compared_by_todays_names(
    begun: dict[str, str], now: dict[str, Any], differing: dict[str, Any]
) -> None:
    assert different({"type": "Settings", **begun}, StalenessSettings(**now)) == differing
