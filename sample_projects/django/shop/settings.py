"""Settings of the sample shop. The lock service is chosen in the environment: VOLCANO_API_URL."""

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "a-sample-has-no-secrets"
DEBUG = True
INSTALLED_APPS = [
    "volcano_locks_django",
    "orders",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", BASE_DIR / "shop.sqlite3"),
        # SQLite has no row locks: a transaction that will write says so at its start.
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
