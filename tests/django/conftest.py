"""Django for the tests beside this file: three databases, made when first asked for.

``alias``: a test that takes it runs on SQLite, PostgreSQL and MariaDB, each time with empty tables.
``sqlite``: the alias "default" alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import django
import pymysql
import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections, transaction

from tests.databases import VENDORS, database

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.django.settings")
pymysql.install_as_MySQLdb()
django.setup()

ALIASES = {"sqlite": "default", "postgresql": "postgresql", "mariadb": "mariadb"}


@pytest.fixture(scope="session")
def made() -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        made: dict[str, Any] = {"stack": stack}
        yield made
        for alias in ALIASES.values():
            connections[alias].close()


def use(made: dict[str, Any], vendor: str) -> str:
    """The alias of this kind of database, with all tables, empty."""
    alias = ALIASES[vendor]
    connection = connections[alias]
    mine = [*apps.get_app_config("app").get_models()][::-1] + _own_models()  # children first
    if vendor not in made:
        made[vendor] = made["stack"].enter_context(database(vendor))
        connection.settings_dict.update(made[vendor].django())
        call_command("migrate", "volcano_locks", database=alias, verbosity=0)
        with connection.schema_editor() as editor:
            for model in apps.get_app_config("app").get_models():
                if model._meta.managed and not model._meta.proxy:
                    editor.create_model(model)
    with transaction.atomic(using=alias), connection.cursor() as cursor:
        for model in mine:
            if model._meta.managed and not model._meta.proxy:
                cursor.execute(f"DELETE FROM {connection.ops.quote_name(model._meta.db_table)}")
    return alias


def _own_models() -> list[Any]:
    return list(apps.get_app_config("volcano_locks").get_models())


@pytest.fixture(params=VENDORS)
def alias(request: pytest.FixtureRequest, made: dict[str, Any]) -> str:
    return use(made, request.param)


@pytest.fixture
def sqlite(made: dict[str, Any]) -> str:
    return use(made, "sqlite")
