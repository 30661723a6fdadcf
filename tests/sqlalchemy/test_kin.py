"""The packages that ride on SQLAlchemy, for real: Flask-SQLAlchemy, SQLModel, Alembic."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column
from sqlalchemy.orm import Session as OrmSession
from sqlalchemy.orm.attributes import set_attribute

from volcano_locks.errors import CannotFence, StaleFence
from volcano_locks.fence_testing import assert_fenced, assert_fenced_async
from volcano_locks.models import Lease
from volcano_locks.sqlalchemy import (
    FencedMixin,
    check_models,
    fence_table,
    fenced_save,
    fenced_transaction,
    fenced_update,
    fencing_columns,
)

from .sides import BIG, lease


def test_flask_sqlalchemy(tmp_path: Path) -> None:
    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy

    db = SQLAlchemy()

    class Report(FencedMixin, db.Model):  # type: ignore[name-defined, misc]
        id = sa.Column(sa.Integer, primary_key=True)
        total = sa.Column(sa.Integer, default=0)

    class Elsewhere(FencedMixin, db.Model):  # type: ignore[name-defined, misc]
        __bind_key__ = "other"
        id = sa.Column(sa.Integer, primary_key=True)
        total = sa.Column(sa.Integer, default=0)

    fence_table(db.metadata)
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'main.sqlite3'}"
    app.config["SQLALCHEMY_BINDS"] = {"other": f"sqlite:///{tmp_path / 'other.sqlite3'}"}
    db.init_app(app)
    with app.app_context():
        db.create_all()
        for model in (Report, Elsewhere):
            db.session.add(model(id=1, total=0))
            db.session.commit()
            report = db.session.get(model, 1)
            change = sa.update(model).where(model.id == 1).values(total=model.total + 1)
            assert fenced_update(db.session, lease(5), change) == 1
            assert (report.total, report.fencing_token) == (1, BIG + 5)
            report.total = 9
            fenced_save(db.session, lease(6), report)
            db.session.commit()
            with pytest.raises(StaleFence):
                fenced_update(db.session, lease(5), change)
            db.session.rollback()
            assert report.total == 9
        with fenced_transaction(db.session, lease(7)):
            db.session.add(Report(id=2, total=2))
        with pytest.raises(StaleFence), fenced_transaction(db.session, lease(6)):
            pass
        assert db.session.get(Report, 2).total == 2
        assert check_models(db.Model) == []
        db.session.remove()
        for engine in db.engines.values():
            engine.dispose()


def test_sqlmodel_sync_and_async(tmp_path: Path) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlmodel import Field, Session, SQLModel, select
    from sqlmodel.ext.asyncio.session import AsyncSession

    class Job(FencedMixin, SQLModel, table=True):
        id: int | None = Field(default=None, primary_key=True)
        done: int = 0

    path = tmp_path / "jobs.sqlite3"
    engine = sa.create_engine(f"sqlite:///{path}")
    SQLModel.metadata.create_all(engine)
    assert check_models(SQLModel.metadata, engine) == []
    change = sa.update(Job).where(Job.id == 1).values(done=Job.done + 1)  # type: ignore[arg-type, operator]

    def work(leader: Lease) -> None:
        with Session(engine) as session:
            fenced_update(session, leader, change)
            session.commit()

    def read() -> list[Any]:
        with Session(engine) as session:
            return [(job.done, job.fencing_token) for job in session.exec(select(Job)).all()]

    with Session(engine) as session:
        session.add(Job(id=1))
        session.commit()
        job = session.get(Job, 1)
        assert job is not None
        set_attribute(job, "fencing_token", 3)
        with pytest.raises(CannotFence):
            session.commit()
    assert_fenced(work, read=read)

    async def over_asyncio() -> None:
        other = create_async_engine(f"sqlite+aiosqlite:///{path}")

        async def work(leader: Lease) -> None:
            async with AsyncSession(other) as session:
                job = await session.get(Job, 1)
                assert await fenced_update(session, leader, change) == 1
                assert job is not None
                assert job.fencing_token == leader.fencing_token
                await session.commit()

        async def read() -> list[Any]:
            async with AsyncSession(other) as session:
                return [job.done for job in (await session.exec(select(Job))).all()]

        await assert_fenced_async(work, read=read, tokens=(2**60, 2**60 + 1))
        await other.dispose()

    asyncio.run(over_asyncio())
    engine.dispose()


def test_mapped_dataclasses() -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Point(FencedMixin, Base):
        __tablename__ = "point"
        id: Mapped[int] = mapped_column(primary_key=True)
        n: Mapped[int] = mapped_column(default=0)

    engine = sa.create_engine("sqlite://")
    Base.metadata.create_all(engine)
    with OrmSession(engine) as session:
        fenced_save(session, lease(5), Point(id=1, n=2))
        assert fenced_update(session, lease(5), sa.update(Point).values(n=3)) == 1
        assert session.get_one(Point, 1).n == 3
    engine.dispose()


MIGRATION = """
from alembic import op
import sqlalchemy as sa
from volcano_locks.sqlalchemy import fence_table, fencing_columns

revision, down_revision = "2", "1"

def upgrade():
    fence_table(sa.MetaData()).create(op.get_bind())
    with op.batch_alter_table("report") as table:
        for column in fencing_columns():
            table.add_column(column)

def downgrade():
    with op.batch_alter_table("report") as table:
        table.drop_column("fencing_key")
        table.drop_column("fencing_token")
    op.drop_table("volcano_locks_fence")
"""
FIRST = """
from alembic import op
import sqlalchemy as sa

revision, down_revision = "1", None

def upgrade():
    op.create_table("report", sa.Column("id", sa.Integer, primary_key=True))
    op.execute("INSERT INTO report (id) VALUES (1)")

def downgrade():
    op.drop_table("report")
"""
ENVIRONMENT = """
from alembic import context
connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=context.config.attributes["metadata"])
with context.begin_transaction():
    context.run_migrations()
"""


def test_alembic_adds_the_columns_to_a_table_with_rows_and_finds_nothing_left_to_do(
    tmp_path: Path, sync_side: Any
) -> None:
    from alembic import command
    from alembic.autogenerate import compare_metadata
    from alembic.config import Config
    from alembic.migration import MigrationContext

    from tests.databases import database

    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "versions" / "one.py").write_text(FIRST)
    (tmp_path / "versions" / "two.py").write_text(MIGRATION)
    metadata = sa.MetaData()
    report = sa.Table(
        "report", metadata, sa.Column("id", sa.Integer, primary_key=True), *fencing_columns()
    )
    fence_table(metadata)
    with database(sync_side.vendor) as db, contextlib.redirect_stdout(io.StringIO()):
        engine = sa.create_engine(db.url())
        config = Config()
        config.set_main_option("script_location", str(tmp_path))
        config.set_main_option("path_separator", "os")
        with engine.begin() as connection:
            config.attributes.update(connection=connection, metadata=metadata)
            command.upgrade(config, "head")
        with engine.begin() as connection:
            assert check_models(metadata, connection) == []
            assert fenced_update(connection, lease(5), sa.update(report)) == 1
            with fenced_transaction(connection, lease(5)):
                pass
            left = compare_metadata(MigrationContext.configure(connection), metadata)
            assert [difference for difference in left if "alembic" not in str(difference)] == []
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.downgrade(config, "base")
        engine.dispose()
