import uuid

from django.db import models
from django.db.models.expressions import Col
from django.db.models.functions import Upper

from volcano_locks_django import FencedManager, FencedModel, FencedQuerySet


class State(FencedModel):
    """One row per job, with a key that the program chose."""

    name = models.CharField(max_length=40, primary_key=True)
    n = models.BigIntegerField(default=0)
    touched = models.DateTimeField(auto_now=True)


class Row(FencedModel):
    """Many rows with a key that the database chooses."""

    slug = models.CharField(max_length=40, unique=True)
    tenant = models.IntegerField(default=0)
    day = models.IntegerField(default=0)
    n = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "day", "slug"], name="one_slug_a_day")
        ]


class Bound(FencedModel):
    """Of one lock only, without the second column."""

    fencing_key = None
    fence_key = "rollup"
    n = models.BigIntegerField(default=0)


class Note(models.Model):
    """Not fenced; belongs to a fenced row."""

    state = models.ForeignKey(State, on_delete=models.CASCADE, related_name="notes")
    text = models.CharField(max_length=40, default="")


class OfState(FencedModel):
    """Fenced, and belongs to another fenced row."""

    state = models.ForeignKey(State, on_delete=models.CASCADE, related_name="parts")
    n = models.BigIntegerField(default=0)


class Plain(models.Model):
    """Not fenced at all."""

    n = models.BigIntegerField(default=0)


class Pair(FencedModel):
    """With a primary key of two columns."""

    pk = models.CompositePrimaryKey("left", "right")
    left = models.IntegerField()
    right = models.IntegerField()
    n = models.BigIntegerField(default=0)


class OwnQuerySet(FencedQuerySet):
    def big(self):
        return self.filter(n__gt=10)


class Own(FencedModel):
    """With a queryset class of its own."""

    n = models.BigIntegerField(default=0)
    objects = OwnQuerySet.as_manager()


class StateProxy(State):
    objects = FencedManager()

    class Meta:
        proxy = True


class Legacy(FencedModel):
    """A table that somebody else made; tests make it, in the wrong ways."""

    n = models.BigIntegerField(default=0)

    class Meta:
        managed = False
        db_table = "legacy"


class Stamped(FencedModel):
    """With a random primary key that Python chooses."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    n = models.BigIntegerField(default=0)


class Tree(FencedModel):
    """Belongs to another row of its own table."""

    parent = models.ForeignKey("self", models.CASCADE, null=True, related_name="branches")


class Loose(FencedModel):
    """Outlives the fenced row that it points to."""

    state = models.ForeignKey(State, models.SET_NULL, null=True)


class FoldedCol(Col):
    def as_sql(self, compiler, connection):
        text, parameters = super().as_sql(compiler, connection)
        return f"LOWER({text})", parameters


class FoldedField(models.CharField):
    """It is compared in lower case, and unique as it is."""

    def get_col(self, alias, output_field=None):
        return FoldedCol(alias, self, output_field)


class Folded(FencedModel):
    slug = FoldedField(max_length=40, unique=True)
    n = models.IntegerField(default=0)


class ShoutField(models.CharField):
    """What is written to it is an expression."""

    def get_db_prep_save(self, value, **options):
        return Upper(models.Value(super().get_db_prep_save(value, **options)))


class Computed(FencedModel):
    """With values that the database chooses."""

    name = models.CharField(max_length=40, primary_key=True)
    n = models.IntegerField(default=1)
    shout = ShoutField(max_length=40, default="")
    done = models.BooleanField(default=False)
    chosen = models.IntegerField(db_default=9)
    double = models.GeneratedField(
        expression=models.F("n") * 2, output_field=models.IntegerField(), db_persist=True
    )
    made = models.DateTimeField(auto_now_add=True)
    seen = models.DateTimeField(auto_now_add=True, null=True)
    touched = models.DateTimeField(auto_now=True)
