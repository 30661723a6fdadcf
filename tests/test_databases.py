"""The databases of the suite are real, empty and separate."""

from __future__ import annotations

import pytest

from tests.databases import VENDORS, database


@pytest.mark.parametrize("vendor", VENDORS)
def test_two_databases_of_one_server_do_not_see_each_other(vendor: str) -> None:
    with database(vendor) as one, database(vendor) as other:
        one.execute("CREATE TABLE t (n INTEGER)")
        other.execute("CREATE TABLE t (n INTEGER)", "DROP TABLE t")
        one.execute("INSERT INTO t VALUES (1)")


@pytest.mark.parametrize("vendor", VENDORS)
def test_sqlalchemy_reaches_the_database_by_its_url(vendor: str) -> None:
    from sqlalchemy import create_engine, text

    with database(vendor) as db:
        engine = create_engine(db.url())
        with engine.connect() as connection:
            assert connection.execute(text("SELECT 1")).scalar() == 1
        engine.dispose()
