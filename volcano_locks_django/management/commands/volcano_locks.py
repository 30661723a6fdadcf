"""``manage.py volcano_locks``: look at locks, release one by force, look at fences.

The law of this module: it only puts Django's clothes on ``volcano_locks.command`` and on
``volcano_locks_django.fence_command``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError

from volcano_locks.command import CommandEnded, force_release, status

from ... import fence_command
from ...conf import lock_client

if TYPE_CHECKING:
    from django.core.management.base import CommandParser


class Command(BaseCommand):
    help = "Look at project locks, release one by force, look at fences."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        action = actions.add_parser("status", help="say who holds each lock, and until when")
        action.add_argument("keys", nargs="+", metavar="KEY")
        action = actions.add_parser("force-release", help="free a lock, whoever holds it")
        action.add_argument("key", metavar="KEY")
        action.add_argument("--yes", action="store_true", help="do not ask")
        action = actions.add_parser("fence", help="show the database's fences, or reset one")
        fence_command.add_arguments(action)

    def handle(self, *args: Any, **options: Any) -> None:
        def confirm(question: str) -> bool:
            return bool(options["yes"]) or self._asks(question)

        say = self.stdout.write
        try:
            if options["action"] == "status":
                status(lock_client, options["keys"], say=say)
            elif options["action"] == "force-release":
                force_release(lock_client, options["key"], confirm=confirm, say=say)
            else:
                fence_command.run(options, say=say, confirm=confirm)
        except CommandEnded as ended:
            raise CommandError(str(ended), returncode=ended.exit_code) from ended.__cause__

    def _asks(self, question: str) -> bool:
        self.stdout.write(f"{question} [y/N] ", ending="")
        self.stdout.flush()
        try:
            return input().strip().lower() in {"y", "yes"}
        except EOFError:
            raise CommandError("nobody to ask: use --yes", returncode=64) from None
