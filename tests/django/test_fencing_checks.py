"""manage.py check finds a fence that the database would not keep."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.db import connections

from tests.django.test_fencing_rows import legacy
from volcano_locks_django.checks import check_tables


def found(alias: str) -> list[tuple[str | None, str]]:
    messages = check_tables([apps.get_app_config("app")], [alias])
    assert all(message.hint for message in messages)
    return [(message.id, message.msg) for message in messages]


def test_good_tables_have_no_findings(alias: str) -> None:
    assert found(alias) == []


def test_all_checks_run_clean_with_and_without_databases(alias: str) -> None:
    mine = [m for m in run_checks(databases=[alias]) if str(m.id).startswith("volcano_locks.")]
    assert mine == []
    assert check_tables(None, None) == []


@pytest.mark.parametrize(
    ("token", "key", "ids"),
    [
        ("BIGINT NOT NULL", "VARCHAR(128) NOT NULL", []),
        ("INTEGER NOT NULL", "VARCHAR(128) NOT NULL", ["E005"]),
        ("VARCHAR(20) NOT NULL", "VARCHAR(128) NOT NULL", ["E005"]),
        ("BIGINT NOT NULL", "BIGINT NOT NULL", ["E005"]),
        ("BIGINT NULL", "VARCHAR(128) NULL", ["W002", "W002"]),
    ],
)
def test_columns_that_would_not_keep_a_token_are_found(
    alias: str, token: str, key: str, ids: list[str]
) -> None:
    with legacy(alias, token, key):
        assert [id_ for id_, _ in found(alias)] == [f"volcano_locks.{id_}" for id_ in ids]


def test_rows_with_null_are_counted(alias: str) -> None:
    with legacy(alias, "BIGINT NULL") as cursor:
        cursor.execute("INSERT INTO legacy VALUES (1, 0, NULL, ''), (2, 0, 0, '')")
        ((id_, message),) = found(alias)
        assert id_ == "volcano_locks.E006"
        assert "NULL in 1 row(s)" in message


def test_a_missing_column_is_found(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE TABLE legacy (id BIGINT PRIMARY KEY, n BIGINT NOT NULL)")
        try:
            assert [id_ for id_, _ in found(alias)] == ["volcano_locks.E004"] * 2
        finally:
            cursor.execute("DROP TABLE legacy")


def test_tables_that_are_routed_elsewhere_are_passed_over(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import router

    class Elsewhere:
        def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
            return False

    monkeypatch.setattr(router, "routers", [Elsewhere()])
    with legacy(alias, "INTEGER NOT NULL"):
        assert found(alias) == []
