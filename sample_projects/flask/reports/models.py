from __future__ import annotations

import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from volcano_locks.sqlalchemy import FencedMixin


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)


class Order(db.Model):
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Report(FencedMixin, db.Model):
    """What was sold so far. Only a leader writes it, and only while no newer one has."""

    name: Mapped[str] = mapped_column(sa.String(40), primary_key=True)
    orders: Mapped[int] = mapped_column(default=0)
    cents: Mapped[int] = mapped_column(default=0)
    last_order: Mapped[int] = mapped_column(default=0)
