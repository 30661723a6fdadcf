"""The Django application: its label, its checks."""

from __future__ import annotations

from django.apps import AppConfig


class VolcanoLocksConfig(AppConfig):
    """``INSTALLED_APPS += ["volcano_locks_django"]``. Tables and checks are labelled volcano_locks."""

    name = "volcano_locks_django"
    label = "volcano_locks"
    verbose_name = "Volcano locks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401 - importing it registers the checks
