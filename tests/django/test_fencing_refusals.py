"""What cannot be fenced with certainty is refused before any statement, and told what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections, models, transaction
from django.db.models import BooleanField, Count, Exists, F, Func, OuterRef, Q, Subquery, Window
from django.db.models.functions import RowNumber
from django.test.utils import isolate_apps, register_lookup

from tests.django.app.models import Note, OfState, Row, State
from tests.django.leases import lease
from tests.django.sending import statements
from volcano_locks.errors import CannotFence, StaleFence
from volcano_locks_django import FencedModel, FencedQuerySet, FencingTokenField, LockKeyField
from volcano_locks_django.checks import check_models

OF_STATE = OfState.objects
ROWS = Row.objects

REFUSED: dict[str, tuple[Any, str]] = {
    "a join": (lambda: OF_STATE.filter(state__n__gt=0), "a relation to another table"),
    "another table's fence": (
        lambda: OF_STATE.filter(state__fencing_token__lte=7),
        "a relation to another table",
    ),
    "a join to many": (lambda: State.objects.filter(notes__text="x"), "a relation"),
    "an outer join": (lambda: State.objects.filter(notes__isnull=True), "a relation"),
    "a slice": (lambda: ROWS.all()[:5], "pk__in"),
    "a union": (lambda: ROWS.filter(n=1).union(ROWS.filter(n=2)), "filter with Q objects"),
    "an intersection": (lambda: ROWS.filter(n=1).intersection(ROWS.all()), "Q objects"),
    "distinct": (lambda: ROWS.distinct(), r"distinct\(\)"),
    "groups": (lambda: ROWS.values("day").annotate(c=Count("pk")), "an aggregate"),
    "an aggregate of another table": (
        lambda: State.objects.annotate(c=Count("notes")).filter(c=0),
        "an aggregate",
    ),
    "a window": (
        lambda: ROWS.annotate(r=Window(RowNumber())).filter(r=1),
        "an aggregate or window function",
    ),
    "extra": (lambda: ROWS.extra(where=["n > 0"]), r"extra\(\)"),
    "values": (lambda: ROWS.values("n"), r"values\(\)"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("write", ["update", "delete"])
def test_a_queryset_that_would_not_be_one_statement_is_refused(
    sqlite: str, what: str, write: str
) -> None:
    build, advice = REFUSED[what]
    values = {"n": 1} if write == "update" else {}
    with statements(sqlite) as sent, pytest.raises(CannotFence, match=advice) as refused:
        getattr(build(), f"fenced_{write}")(lease(7), **values)
    assert "Instead: " in str(refused.value)
    assert "fenced_transaction(lease)" in str(refused.value)
    assert sent == []


@pytest.mark.parametrize(
    "sql", ["(1 = 1", "1 = 1) OR (1 = 1", "1 = 1 -- ", "1 = 1 /* ", "1 = '1", "1 = $$1$$"]
)
def test_sql_of_ones_own_that_reaches_beyond_its_end_is_refused(sqlite: str, sql: str) -> None:
    raw = Func(template=sql, output_field=BooleanField())
    for write in (
        lambda: ROWS.filter(raw).fenced_update(lease(7)),
        lambda: ROWS.filter(raw).fenced_delete(lease(7)),
        lambda: ROWS.filter(pk=1).fenced_update(lease(7), n=raw),
    ):
        with statements(sqlite) as sent, pytest.raises(CannotFence, match="Instead: close it"):
            write()
        assert sent == []


def test_sub_selects_stay_inside_the_statement(alias: str) -> None:
    State.objects.using(alias).create(name="a")
    State.objects.using(alias).create(name="b")
    Note.objects.using(alias).create(state_id="a")
    states = State.objects.using(alias)
    noted = Note.objects.using(alias)
    for rows in (
        states.filter(pk__in=Subquery(noted.values("state_id"))),
        states.filter(Exists(noted.filter(state_id=OuterRef("pk")))),
        states.exclude(notes__isnull=True)
        if False
        else states.filter(pk__in=noted.values("state")),
        states.annotate(m=F("n") + 1).filter(m=1, pk="a"),
        states.filter(Q(pk="a") | Q(pk="c")),
        states.filter(pk="a") | states.filter(pk="c"),
        states.filter(~Q(pk="b")),
        states.exclude(pk="b").order_by("notes__text", "n"),
        states.filter(pk="a").only("name"),
    ):
        assert rows.fenced_update(lease(7), n=0) == 1
        with pytest.raises(StaleFence):
            rows.fenced_update(lease(6), n=1)
    assert states.get(pk="b").fencing_token == 0


def test_or_and_not_of_a_filter_cannot_reach_the_fence(alias: str) -> None:
    """The fence stands beside the whole filter, never inside it."""
    rows = Row.objects.using(alias)
    rows.create(slug="a", fencing_token=9, fencing_key="rollup")
    for filtered in (
        rows.filter(Q(slug="x") | Q(n=0)),
        rows.exclude(Q(slug="x") & Q(n=0)),
        rows.filter(slug="x") | rows.filter(n=0),
        rows.filter(~(Q(slug="x") | ~Q(n=0))),
        rows.filter(fencing_token__gte=0),
    ):
        with pytest.raises(StaleFence):
            filtered.fenced_update(lease(8), n=1)
        with pytest.raises(StaleFence):
            filtered.fenced_delete(lease(8))
    assert rows.get().n == 0


class Either(models.Lookup):  # type: ignore[type-arg]
    """A lookup as anybody may write it: an OR without parentheses."""

    lookup_name = "either"

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        left, parameters = self.process_lhs(compiler, connection)
        right, more = self.process_rhs(compiler, connection)
        return f"{left} = {right} OR {left} = {right}", [*parameters, *more, *parameters, *more]


class AnyOf(models.Func):
    template, arg_joiner = "%(expressions)s", " OR "
    conditional = True
    output_field: Any = models.BooleanField()


def test_an_or_in_the_sql_of_ones_own_lookup_or_function_cannot_reach_the_fence(alias: str) -> None:
    rows = Row.objects.using(alias)
    rows.create(slug="a", n=2, fencing_token=9, fencing_key="rollup")
    rows.create(slug="b", n=2, fencing_token=1, fencing_key="rollup")
    with register_lookup(models.BigIntegerField, Either):
        for filtered in (
            rows.filter(n__either=2),
            rows.filter(n__either=2, slug="b"),  # Django's AND binds closer than that OR
            rows.filter(Q(n__either=2, _connector="OR"), slug="b"),
            rows.filter(AnyOf(Q(n=2), Q(day=0))),
            rows.filter(AnyOf(Q(n=2), Q(day=0)), slug="b"),
            rows.filter(AnyOf(Q(n=2), Q(day=0)) | Q(n=77)),
        ):
            with pytest.raises(StaleFence):
                filtered.fenced_update(lease(8), n=666)
            with pytest.raises(StaleFence):
                filtered.fenced_delete(lease(8))
        assert list(rows.values_list("n", flat=True)) == [2, 2]
        assert rows.filter(n__either=2).fenced_update(lease(9), n=3) == 2


@pytest.mark.needs("mariadb")
def test_mysql_is_not_given_a_delete_that_it_would_rewrite(made: Any) -> None:
    from tests.django.conftest import use

    alias = use(made, "mariadb")
    rows = Row.objects.using(alias)
    with statements(alias) as sent, pytest.raises(CannotFence, match="a sub-select from the same"):
        rows.filter(pk__in=rows.filter(n=0).values("pk")).fenced_delete(lease(7))
    assert sent == []


def test_a_replica_is_refused(sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["default"].settings_dict["TEST"], "MIRROR", "postgresql")
    with pytest.raises(CannotFence, match="the replica 'default'"):
        Row.objects.filter(n=0).fenced_update(lease(7), n=1)


def test_an_untested_database_is_refused(sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    with pytest.raises(CannotFence, match="fenced writes on oracle are not tested"):
        Row.objects.filter(n=0).fenced_update(lease(7), n=1)


@pytest.mark.needs("postgres")
def test_with_a_replica_router_write_and_recheck_go_to_the_primary_in_one_transaction(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import router

    from tests.django.conftest import use

    use(made, "sqlite")
    primary = use(made, "postgresql")

    class ReadsElsewhere:
        def db_for_read(self, model: Any, **hints: Any) -> str:
            return "default"

        def db_for_write(self, model: Any, **hints: Any) -> str:
            return primary

    same = {"pk": 4711, "slug": "a"}  # on both; their own counters may differ by now
    Row.objects.using(primary).create(**same, fencing_token=9, fencing_key="rollup")
    Row.objects.using("default").create(**same)  # the replica lags behind
    monkeypatch.setattr(router, "routers", [ReadsElsewhere()])
    with statements("default") as replica, statements(primary) as sent:
        for write in (
            lambda: Row.objects.filter(slug="a").fenced_update(lease(8), n=1),
            lambda: Row.objects.filter(n=0).fenced_update(lease(8), n=1),
            lambda: Row.objects.filter(slug="a").fenced_delete(lease(8)),
            lambda: Row.objects.fenced_upsert(lease(8), {"n": 1}, slug="a"),
        ):
            with pytest.raises(StaleFence):
                write()
    assert replica == []
    assert [sql for sql in sent if sql.startswith("SELECT")]
    loaded = Row.objects.get(slug="a")
    assert loaded._state.db == "default"
    with pytest.raises(StaleFence):
        loaded.fenced_save(lease(8))
    loaded.fenced_save(lease(9))
    assert loaded._state.db == primary


# -- models ----------------------------------------------------------------------------------------


class Isolated(FencedModel):
    class Meta:
        abstract = True
        app_label = "app"


@isolate_apps("tests.django.app")
def test_models_whose_fence_would_not_be_certain_are_refused_and_found_by_check(
    sqlite: str,
) -> None:
    class Base(Isolated):
        n = models.BigIntegerField(default=0)

    class Derived(Base):
        m = models.BigIntegerField(default=0)

    class Narrow(Isolated):
        fencing_token = models.IntegerField(default=0)  # type: ignore[assignment]

    class Text(Isolated):
        fencing_token = models.CharField(max_length=20)  # type: ignore[assignment]

    class Plain64(Isolated):
        fencing_token = models.BigIntegerField(default=0)  # type: ignore[assignment]

    class Nullable(Isolated):
        fencing_token = FencingTokenField(null=True)

    class NoToken(Isolated):
        fencing_token = None  # type: ignore[assignment]

    class NoKey(Isolated):
        fencing_key = None  # type: ignore[assignment]

    class TextKey(Isolated):
        fencing_key = models.CharField(max_length=128)  # type: ignore[assignment]

    class NullKey(Isolated):
        fencing_key = LockKeyField(null=True)

    class ShortKey(Isolated):
        fencing_key = LockKeyField(max_length=127)

    class OtherManager(Isolated):
        objects = models.Manager()  # type: ignore[assignment]

    class Good(Isolated):
        pass

    class DerivedProxy(Derived):
        class Meta:
            app_label = "app"
            proxy = True

    class Bound(Isolated):
        fencing_key = None  # type: ignore[assignment]
        fence_key = "rollup"

    class BoundToAnother(Bound):
        fence_key = "other"

        class Meta:
            app_label = "app"
            proxy = True

    expected = {
        Base: set(),
        Bound: set(),
        BoundToAnother: {"volcano_locks.E003"},
        Derived: {"volcano_locks.E001"},
        DerivedProxy: {"volcano_locks.E001"},
        Narrow: {"volcano_locks.E002"},
        Text: {"volcano_locks.E002"},
        Plain64: {"volcano_locks.E002"},
        Nullable: {"volcano_locks.E002"},
        NoToken: {"volcano_locks.E002"},
        NoKey: {"volcano_locks.E003"},
        TextKey: {"volcano_locks.E003"},
        NullKey: {"volcano_locks.E003"},
        ShortKey: {"volcano_locks.E003"},
        OtherManager: {"volcano_locks.W001"},
        Good: set(),
    }

    class Config:
        def get_models(self) -> Any:
            return list(expected)

    found: dict[Any, set[str]] = {model: set() for model in expected}
    for message in check_models([Config()]):
        assert message.hint
        found[message.obj].add(message.id or "")
    assert found == expected
    for model, ids in expected.items():
        if not {id_ for id_ in ids if ".E" in id_}:
            continue
        rows = FencedQuerySet(model=model, using=sqlite)
        with statements(sqlite) as sent, pytest.raises(CannotFence, match="Instead: "):
            rows.filter(pk=1).fenced_update(lease(7))
        with statements(sqlite) as sent_too, pytest.raises(CannotFence, match="Instead: "):
            rows.filter(pk=1).fenced_delete(lease(7))
        assert sent + sent_too == []


@isolate_apps("tests.django.app")
def test_a_child_of_a_fenced_table_cannot_move_its_parents_token(sqlite: str) -> None:
    """F1: the check would be in one statement and the write in another."""

    class Base(Isolated):
        n = models.BigIntegerField(default=0)

    class Derived(Base):
        m = models.BigIntegerField(default=0)

    with connections[sqlite].schema_editor() as editor:
        editor.create_model(Base)
        editor.create_model(Derived)
    try:
        child = Derived.objects.using(sqlite).create(fencing_token=9, fencing_key="rollup")
        for write in (
            lambda: Derived.objects.using(sqlite).filter(pk=child.pk).fenced_update(lease(8), n=1),
            lambda: Derived.objects.using(sqlite).filter(pk=child.pk).fenced_update(lease(9), m=1),
            lambda: child.fenced_save(lease(9)),
            lambda: (
                Derived.objects.using(sqlite).fenced_delete(lease(9))
                if hasattr(Derived.objects, "fenced_delete")
                else Derived.objects.using(sqlite).all().fenced_delete(lease(9))
            ),
        ):
            with pytest.raises(CannotFence, match="inherits from another table"):
                write()
        assert Base.objects.using(sqlite).get().fencing_token == 9
    finally:
        with connections[sqlite].schema_editor() as editor:
            editor.delete_model(Derived)
            editor.delete_model(Base)


@isolate_apps("tests.django.app")
@pytest.mark.needs("postgres")
def test_a_deferred_unique_constraint_does_not_pin_one_row(made: Any) -> None:
    from tests.django.conftest import use

    class Slug(Isolated):
        slug = models.CharField(max_length=10)
        n = models.BigIntegerField(default=0)

        class Meta:
            app_label = "app"
            constraints = [
                models.UniqueConstraint(
                    fields=["slug"], name="later", deferrable=models.Deferrable.DEFERRED
                )
            ]

    alias = use(made, "postgresql")
    with connections[alias].schema_editor() as editor:
        editor.create_model(Slug)
    try:
        rows = Slug.objects.using(alias)
        with transaction.atomic(using=alias):
            rows.create(slug="s", fencing_token=1, fencing_key="rollup")
            newer = rows.create(slug="s", fencing_token=9, fencing_key="rollup")
            with pytest.raises(StaleFence), transaction.atomic(using=alias):
                rows.filter(slug="s").fenced_update(lease(5), n=1)
            newer.delete()
        assert rows.get().n == 0
        with pytest.raises(CannotFence, match="unique together"):
            Slug.objects.db_manager(alias).fenced_upsert(lease(9), {"n": 1}, slug="s")
    finally:
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Slug)
