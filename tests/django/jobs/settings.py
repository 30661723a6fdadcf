"""Settings of the processes that tests start: one database, from the environment."""

import json
import os

SECRET_KEY = "tests"
USE_TZ = True
INSTALLED_APPS = ["volcano_locks_django", "tests.django.jobs"]
DATABASES = {"default": json.loads(os.environ["JOBS_DATABASE"])}

if "mysql" in DATABASES["default"]["ENGINE"]:
    import pymysql

    pymysql.install_as_MySQLdb()
