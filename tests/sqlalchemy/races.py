"""Leaders that are paused and resumed at random, on real connections, and a history to judge by.

A leader takes a fencing token, writes under it, and is now and then paused long enough for others to
take over; it wakes and writes on until it is refused. Each write also adds a line to a history, in
its own transaction and after it has the row: so the lines stand in the order of the writes.

A stale write is a line whose token is lower than the one before it. A false refusal is one that no
newer token explains.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from volcano_locks.errors import StaleFence
from volcano_locks.fencing import Fenced
from volcano_locks.sqlalchemy import fence_table, fenced_transaction, fenced_update, fencing_columns

from .sides import lease

metadata = sa.MetaData()
state = sa.Table(
    "race_state",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("n", sa.Integer, nullable=False, default=0),
    *fencing_columns(),
)
history = sa.Table(
    "race_history",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=True),
    sa.Column("row", sa.Integer, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
)
fence = fence_table(metadata, "race_fence")

Writer = Callable[[sa.Connection, Fenced], list[int]]


def single(connection: sa.Connection, leader: Fenced) -> list[int]:
    change = sa.update(state).where(state.c.id == 1).values(n=state.c.n + 1)
    fenced_update(connection, leader, change)
    return [1]


def several(connection: sa.Connection, leader: Fenced) -> list[int]:
    change = sa.update(state).where(state.c.id.in_([2, 3])).values(n=state.c.n + 1)
    fenced_update(connection, leader, change)
    return [2, 3]


def whole(connection: sa.Connection, leader: Fenced) -> list[int]:
    with fenced_transaction(connection, leader, table=fence):
        connection.execute(sa.update(state).where(state.c.id == 4).values(n=state.c.n + 1))
        _note(connection, leader, [4])
    return []


def unfenced(connection: sa.Connection, leader: Fenced) -> list[int]:
    connection.execute(sa.update(state).where(state.c.id == 1).values(n=state.c.n + 1))
    return [1]


def _note(connection: sa.Connection, leader: Fenced, rows: list[int]) -> None:
    for row in rows:
        connection.execute(sa.insert(history).values(row=row, token=leader.fencing_token))


@dataclass
class Outcome:
    writes: int = 0
    refusals: int = 0
    deadlocks: int = 0
    stale: list[Any] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    other: list[BaseException] = field(default_factory=list)


def race(
    url: str,
    writers: list[Writer],
    enough: Callable[[Outcome], bool],
    *,
    seconds: float = 0,
    leaders: int = 2,
) -> Outcome:
    """Let so many leaders per writer race, each writer with a lock of its own.

    For so many seconds, and then until the outcome is enough, for at most a minute more.
    """
    engine = sa.create_engine(url, pool_size=leaders * len(writers) + 1)
    metadata.drop_all(engine)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(state), [{"id": id_} for id_ in (1, 2, 3, 4)])
    outcome = Outcome()
    stop = threading.Event()
    threads = []
    for writer in writers:
        tokens, newest, turn = itertools.count(1), [0], threading.Lock()

        def lead(
            seed: int,
            writer: Writer = writer,
            tokens: Any = tokens,
            newest: list[int] = newest,
            turn: threading.Lock = turn,
        ) -> None:
            chance = random.Random(seed)
            with engine.connect() as connection:
                while not stop.is_set():
                    with turn:
                        leader = lease(next(tokens), writer.__name__)
                        newest[0] = leader.fencing_token
                        for _ in range(chance.randrange(5, 60)):
                            if stop.is_set() or not _write(
                                connection, leader, writer, chance, newest, outcome
                            ):
                                break
                    # Paused, and the lease has run out; awake, it does not know that yet.
                    time.sleep(chance.random() * 0.02)
                    for _ in range(3):
                        if not _write(connection, leader, writer, chance, newest, outcome):
                            break

        threads += [
            threading.Thread(target=lead, args=(len(threads) * 1000 + number,))
            for number in range(leaders)
        ]
    for thread in threads:
        thread.start()
    least = time.monotonic() + seconds
    while (now := time.monotonic()) < least + 60 and not (outcome.false or outcome.other):
        if now >= least:
            _judge(engine, outcome)
            if enough(outcome):
                break
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join(60)
    _judge(engine, outcome)
    metadata.drop_all(engine)
    engine.dispose()
    return outcome


def _judge(engine: sa.Engine, outcome: Outcome) -> None:
    """What the history has of writes by now."""
    outcome.writes, outcome.stale = 0, []
    with engine.connect() as connection:
        for row in (1, 2, 3, 4):
            query = sa.select(history.c.token).where(history.c.row == row).order_by(history.c.id)
            lines = connection.scalars(query).all()
            outcome.writes += len(lines)
            outcome.stale += [pair for pair in itertools.pairwise(lines) if pair[1] < pair[0]]


def _write(
    connection: sa.Connection,
    leader: Fenced,
    writer: Writer,
    chance: random.Random,
    newest: list[int],
    outcome: Outcome,
) -> bool:
    """One write in a transaction of its own; whether the leader may go on."""
    try:
        _note(connection, leader, writer(connection, leader))
        if chance.random() < 0.01:
            time.sleep(chance.random() * 0.01)  # paused between the write and its commit
        connection.commit()
    except StaleFence as refusal:
        connection.rollback()
        outcome.refusals += 1
        if not leader.fencing_token < (refusal.stored or 0) <= newest[0]:
            outcome.false.append(str(refusal))
        return False
    except OperationalError as error:
        connection.rollback()
        if "eadlock" not in str(error):
            outcome.other.append(error)
        outcome.deadlocks += 1
    except Exception as error:
        connection.rollback()
        outcome.other.append(error)
        return False
    return True
