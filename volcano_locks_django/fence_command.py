"""``manage.py volcano_locks fence status|reset``: look at the fences of a database, and forget tokens.

The law of this module: tokens never go back by themselves. The one way back is ``reset``, for a
database that was copied from another environment and holds higher tokens than this one's locks will
ever offer: a person confirms it, and the database keeps a record of it. It changes nothing but the
fence's own columns, in one transaction.
"""

from __future__ import annotations

import getpass
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.management.base import CommandError
from django.db import connections, models, router, transaction

from volcano_locks.errors import InvalidRequest
from volcano_locks.models import check_key

from .checks import fenced_models
from .fencing import KEY, TOKEN, FencedModel, columns, model_faults
from .models import Fence, FenceReset

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["add_arguments", "run"]

logger = logging.getLogger("volcano_locks")

_FENCE_ROW = "fence row"


class FenceState(NamedTuple):
    """What one target of a database remembers of one lock. ``key`` is "" for rows never fenced."""

    target: str
    key: str
    rows: int
    highest_token: int | None


def add_arguments(parser: ArgumentParser) -> None:
    """Give ``parser`` the two actions and their options; ``run`` takes what they parse to."""
    actions = parser.add_subparsers(dest="fence_action", required=True, metavar="status|reset")
    status = actions.add_parser("status", help="show the tokens that the database remembers")
    reset = actions.add_parser(
        "reset", help="forget the tokens of one lock (after a copied database)"
    )
    reset.add_argument("key", metavar="KEY", help="the key of the lock")
    reset.add_argument(
        "--model",
        action="append",
        metavar="APP.MODEL",
        help="only the rows of this model; can be repeated (default: all, and the fence row)",
    )
    reset.add_argument("--reason", default="", help="kept in the record of the reset")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    for action in (status, reset):
        action.add_argument("--database", default="default", metavar="ALIAS")


def run(
    options: Mapping[str, Any], *, say: Callable[[str], object], confirm: Callable[[str], bool]
) -> None:
    """Do what the options of ``add_arguments`` ask for. ``confirm`` asks a person a question.

    Raises CommandError: exit code 64 for a bad key, model or database, 1 if the person said no.
    """
    alias = options["database"]
    if alias not in connections:
        raise CommandError(f"no database {alias!r} in settings.DATABASES", returncode=64)
    if options["fence_action"] == "status":
        _status(alias, say)
    else:
        _reset(alias, options, say, confirm)


def _status(alias: str, say: Callable[[str], object]) -> None:
    states = list(_states(alias))
    for state in states:
        token = "no token (NULL)" if state.highest_token is None else f"token {state.highest_token}"
        lock = f"lock {state.key}" if state.key else "no lock yet"
        say(f"{state.target}: {lock}, highest {token}, {state.rows} row(s)")
    if not states:
        say(f"database {alias!r} has no fenced rows")
    for record in FenceReset.objects.using(alias)[:5]:
        reason = f": {record.reason}" if record.reason else ""
        say(f"reset {record.reset_at:%Y-%m-%d %H:%M} by {record.reset_by}: {record}{reason}")


def _reset(
    alias: str,
    options: Mapping[str, Any],
    say: Callable[[str], object],
    confirm: Callable[[str], bool],
) -> None:
    try:
        key = check_key(options["key"])
    except InvalidRequest as error:
        raise CommandError(str(error), returncode=64) from error
    wanted = set(options["model"] or ())
    known = {model._meta.label for model in _models(alias)}
    if strange := sorted(wanted - known):
        raise CommandError(
            f"no fenced model {', '.join(strange)} in database {alias!r}; "
            f"there: {', '.join(sorted(known)) or 'none'}",
            returncode=64,
        )
    with transaction.atomic(using=alias):
        found = [
            state
            for state in _states(alias)
            if state.key == key and state.highest_token and (not wanted or state.target in wanted)
        ]
        if not found:
            say(f"database {alias!r} remembers no token of lock {key!r}: nothing to reset")
            return
        for state in found:
            say(f"{state.target}: {state.rows} row(s), highest token {state.highest_token}")
        if not options["yes"] and not confirm(
            f"Until the next fenced write, a displaced holder of {key!r} can write to database "
            f"{alias!r} again. Stop its workers first. Forget these tokens?"
        ):
            raise CommandError("nothing was reset", returncode=1)
        for state in found:
            rows = _forget(alias, key, state.target)
            record = FenceReset.objects.using(alias).create(
                key=key,
                target=state.target,
                rows=rows,
                highest_token=state.highest_token or 0,
                reset_by=_person(),
                reason=options["reason"],
            )
            logger.warning("fence reset in database %r: %s", alias, record)
    say(f"reset, and recorded in {FenceReset._meta.db_table}")


def _states(alias: str) -> Iterator[FenceState]:
    for fence in Fence.objects.using(alias).order_by("key"):
        yield FenceState(_FENCE_ROW, fence.key, 1, fence.fencing_token)
    for model in _models(alias):
        rows = models.QuerySet(model=model, using=alias).order_by()
        numbers = {"rows": models.Count("pk"), "highest": models.Max(TOKEN)}
        if model.fence_key and columns(model).key is None:
            found = rows.aggregate(**numbers)
            if found["rows"]:
                yield FenceState(
                    model._meta.label, model.fence_key, found["rows"], found["highest"]
                )
        else:
            for found in rows.values(KEY).annotate(**numbers).order_by(KEY):
                yield FenceState(model._meta.label, found[KEY], found["rows"], found["highest"])


def _models(alias: str) -> Iterator[type[FencedModel]]:
    tables = set(connections[alias].introspection.table_names())
    for model in fenced_models():
        mine = not model._meta.proxy and model._meta.db_table in tables
        if mine and router.allow_migrate_model(alias, model) and not any(model_faults(model)):
            yield model


def _forget(alias: str, key: str, target: str) -> int:
    # A plain QuerySet: fenced ones refuse to move a token back.
    if target == _FENCE_ROW:
        fences: models.QuerySet[Fence] = models.QuerySet(model=Fence, using=alias)
        return int(fences.filter(key=key).update(fencing_token=0))
    model = next(model for model in _models(alias) if model._meta.label == target)
    rows: models.QuerySet[FencedModel] = models.QuerySet(model=model, using=alias)
    if columns(model).key is None:
        return int(rows.update(fencing_token=0))
    return int(rows.filter(fencing_key=key).update(fencing_token=0, fencing_key=""))


def _person() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "unknown"
