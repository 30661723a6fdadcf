"""A queue in a table, and one consumer over all workers of all replicas.

Any worker takes jobs in; the singleton of the one that leads works them off. Each batch is one fenced
transaction: a worker that was frozen past its lease and wakes up cannot commit after its successor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
import sqlalchemy as sa
from fastapi import Depends, FastAPI, Request
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from volcano_locks import AsyncHold, AsyncLockClient, Policy
from volcano_locks.fastapi import (
    Leadership,
    leader_health,
    leader_lifespan,
    require_leader,
    run_once,
)
from volcano_locks.sqlalchemy import fence_table, fenced_transaction

logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
logging.getLogger("volcano_locks").setLevel(logging.INFO)
logger = logging.getLogger("volcano_locks.sample")

DATABASE = os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///queue.sqlite3?timeout=30")
LOCK = "queue-consumer"


class Base(DeclarativeBase):
    pass


class Job(Base):
    __tablename__ = "job"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(sa.String(200))
    runs: Mapped[int] = mapped_column(default=0)
    worker: Mapped[int | None] = mapped_column(default=None)
    fencing_token: Mapped[int | None] = mapped_column(sa.BigInteger, default=None)


fence_table(Base.metadata)  # the row of our lock in it is advanced by fenced_transaction

# One client for the process. A standby looks every second: that is how long a hand-over takes at
# most, and what it costs (the default of 5 s is kinder to the quota of 600 requests a minute).
locks = AsyncLockClient.from_settings(policy=Policy(poll_interval=1.0))


@asynccontextmanager
async def database(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    """The application's own lifespan: entered before the consumer starts, left after it has ended."""
    engine = create_async_engine(DATABASE)

    async def create_tables(lease: AsyncHold) -> None:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    async def tables_exist() -> bool:
        async with engine.connect() as connection:
            return bool(await connection.run_sync(lambda sync: sa.inspect(sync).has_table("job")))

    try:
        made = await run_once(
            create_tables, key="queue-schema", ttl=30, already_done=tables_exist, client=locks
        )
        logger.info("tables: %s", made.value)
        yield {"sessions": async_sessionmaker(engine, expire_on_commit=False)}
    finally:
        await engine.dispose()


async def consume(lease: AsyncHold, state: dict[str, Any]) -> None:
    """The singleton. Cancelled when the lease is lost and at shutdown; a batch is done or undone."""
    logger.info("worker %d consumes with fencing token %d", os.getpid(), lease.fencing_token)
    while True:
        async with state["sessions"]() as session, fenced_transaction(session, lease):
            waiting = sa.select(Job).where(Job.runs == 0).order_by(Job.id).limit(5)
            batch = (await session.scalars(waiting)).all()
            for job in batch:
                job.runs += 1
                job.worker, job.fencing_token = os.getpid(), lease.fencing_token
        await anyio.sleep(0.05 if batch else 0.2)


app = FastAPI(
    title="One queue, one consumer",
    lifespan=leader_lifespan(consume, key=LOCK, client=locks, lifespan=database),
)
app.add_api_route("/healthz", leader_health)


async def a_session(request: Request) -> AsyncIterator[AsyncSession]:
    async with request.state.sessions() as session:
        yield session


Session = Annotated[AsyncSession, Depends(a_session)]


@app.post("/jobs")
async def enqueue(session: Session, count: int = 1) -> dict[str, int]:
    session.add_all([Job(text=f"job of worker {os.getpid()}") for _ in range(count)])
    await session.commit()
    return {"enqueued": count}


@app.get("/jobs")
async def progress(session: Session) -> dict[str, int]:
    """How many jobs there are, how many are done, and how many were done twice (never any)."""
    total, done, twice = (
        await session.execute(
            sa.select(
                sa.func.count(),
                sa.func.count().filter(Job.runs > 0),
                sa.func.count().filter(Job.runs > 1),
            ).select_from(Job)
        )
    ).one()
    return {"total": total, "done": done, "twice": twice}


@app.get("/leader")
async def leader(leadership: Annotated[Leadership, Depends()]) -> dict[str, Any]:
    """Whether the worker that answers leads. Ask again, and another may answer."""
    return {"worker": os.getpid(), "is_leader": leadership.is_leader}


@app.get("/leader/remaining")
async def remaining(lease: Annotated[AsyncHold, Depends(require_leader)]) -> dict[str, float]:
    """Seconds for which the leading worker may still act; 503 from the others."""
    return {"worker": os.getpid(), "seconds": lease.remaining()}
