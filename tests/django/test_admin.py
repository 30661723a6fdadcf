"""The admin shows fences and lets nobody change them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.test import RequestFactory, override_settings
from django.urls import path
from django.utils import timezone

from volcano_locks_django.models import Fence, FenceReset

urlpatterns = [path("admin/", admin.site.urls)]


@pytest.fixture
def page(sqlite: str) -> Any:
    Fence.objects.create(key="rollup", fencing_token=4503599627370497, advanced_at=timezone.now())
    request = RequestFactory().get("/admin/")
    request.user = User(username="root", is_superuser=True, is_staff=True, is_active=True)
    return request


def test_fences_are_listed_with_their_exact_token(page: Any) -> None:
    with override_settings(ROOT_URLCONF=__name__):
        response = admin.site._registry[Fence].changelist_view(page)
        text = response.render().content.decode()  # type: ignore[attr-defined]
    assert response.status_code == 200
    assert "rollup" in text
    assert "4503599627370497" in text
    assert "Add fence" not in text


@pytest.mark.parametrize("model", [Fence, FenceReset])
def test_not_even_a_superuser_can_change_a_fence(page: Any, model: Any) -> None:
    mine = admin.site._registry[model]
    assert mine.has_view_permission(page)
    assert not mine.has_add_permission(page)
    assert not mine.has_change_permission(page)
    assert not mine.has_delete_permission(page)
    with override_settings(ROOT_URLCONF=__name__), pytest.raises(PermissionDenied):
        mine.add_view(page)
