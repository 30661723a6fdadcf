"""The page on fenced writes is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from django.db import connections, models
from django.test.utils import isolate_apps

import volcano_locks_django
from tests.django.leases import Held

PAGE = Path(__file__).parents[2] / "docs" / "fenced-writes-django.md"


def blocks(kind: str) -> str:
    found = re.findall(r"```python\n# (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return "\n".join(code for what, code in found if what == kind)


@isolate_apps("volcano_locks_django")
def test_the_code_of_the_page_runs(sqlite: str) -> None:
    class Invoice(models.Model):
        number = models.IntegerField()

        class Meta:
            app_label = "volcano_locks"

    names: dict[str, Any] = {"__name__": "volcano_locks_django.page", "lease": Held(7)}
    exec(blocks("models.py"), names)
    made = [Invoice, names["RollupState"], names["Watermark"]]
    with connections[sqlite].schema_editor() as editor:
        for model in made:
            editor.create_model(model)
    try:
        exec(blocks("work"), names | {"Invoice": Invoice})
        assert Invoice.objects.get().number == 1
        assert names["RollupState"].objects.get(name="orders").cursor == 11
        names["Watermark"].objects.create(pk=1)
        assert names["Watermark"].objects.filter(pk=1).fenced_update(names["lease"], value=1) == 1
    finally:
        with connections[sqlite].schema_editor() as editor:
            for model in made:
                editor.delete_model(model)


def test_every_check_and_every_name_of_the_package_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name in ("FencedModel", "FencedQuerySet", "FencedManager", "FenceWarning"):
        assert name in text
        assert hasattr(volcano_locks_django, name)
    for id_ in ("E001", "E002", "E003", "E004", "E005", "E006", "W001", "W002"):
        assert id_ in text
