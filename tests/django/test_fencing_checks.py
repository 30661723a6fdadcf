"""manage.py check finds a fence that the database would not keep."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.db import connections

from tests.django.conftest import use
from tests.django.test_fencing_rows import legacy
from volcano_locks_django.checks import check_tables


def found(alias: str) -> list[tuple[str | None, str]]:
    messages = check_tables([apps.get_app_config("app")], [alias])
    assert all(message.hint for message in messages)
    return [(message.id, message.msg) for message in messages]


EXACT = "<exact>"


def exact(alias: str) -> str:
    return "COLLATE utf8mb4_bin" if connections[alias].vendor == "mysql" else ""


def test_good_tables_have_no_findings(alias: str) -> None:
    assert found(alias) == []


def test_all_checks_run_clean_with_and_without_databases(alias: str) -> None:
    mine = [m for m in run_checks(databases=[alias]) if str(m.id).startswith("volcano_locks.")]
    assert mine == []
    assert check_tables(None, None) == []


@pytest.mark.parametrize(
    ("token", "key", "ids"),
    [
        ("BIGINT NOT NULL", f"VARCHAR(128) {EXACT} NOT NULL", []),
        ("BIGINT NOT NULL", f"TEXT {EXACT} NOT NULL", []),
        ("BIGINT NOT NULL", f"varchar(127) {EXACT} NOT NULL", ["E005"]),
        ("INTEGER NOT NULL", f"VARCHAR(128) {EXACT} NOT NULL", ["E005"]),
        ("VARCHAR(20) NOT NULL", f"VARCHAR(128) {EXACT} NOT NULL", ["E005"]),
        ("BIGINT NOT NULL", "BIGINT NOT NULL", ["E005"]),
        ("BIGINT NULL", f"VARCHAR(128) {EXACT} NULL", ["W002", "W002"]),
    ],
)
def test_columns_that_would_not_keep_a_token_are_found(
    alias: str, token: str, key: str, ids: list[str]
) -> None:
    with legacy(alias, token, key.replace(EXACT, exact(alias))):
        assert [id_ for id_, _ in found(alias)] == [f"volcano_locks.{id_}" for id_ in ids]


CASELESS = {
    "sqlite": 'VARCHAR(128) NOT NULL COLLATE "NOCASE"',
    "mariadb": "VARCHAR(128) COLLATE utf8mb4_general_ci NOT NULL",
}


@pytest.mark.parametrize(
    "vendor", ["sqlite", pytest.param("mariadb", marks=pytest.mark.needs("mariadb"))]
)
def test_a_key_that_is_compared_without_case_is_found(made: Any, vendor: str) -> None:
    alias = use(made, vendor)
    with legacy(alias, "BIGINT NOT NULL", CASELESS[vendor]):
        ((id_, message),) = found(alias)
    assert id_ == "volcano_locks.E005"
    assert "the keys of two locks can be equal" in message


@pytest.mark.needs("postgres")
def test_a_key_of_a_type_that_django_does_not_know_is_found(made: Any) -> None:
    alias = use(made, "postgresql")
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE TYPE key_kind AS ENUM ('rollup')")
        try:
            with legacy(alias, "BIGINT NOT NULL", "key_kind NOT NULL"):
                ((id_, message),) = found(alias)
        finally:
            cursor.execute("DROP TYPE key_kind")
    assert id_ == "volcano_locks.E005"
    assert "is no text" in message


def test_rows_with_null_are_counted(alias: str) -> None:
    with legacy(alias, "BIGINT NULL", f"VARCHAR(128) {exact(alias)} NOT NULL") as cursor:
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
