"""Settings of the processes that tests start: one database, from the environment."""

import json
import os

import pymysql

pymysql.install_as_MySQLdb()

SECRET_KEY = "tests"
USE_TZ = True
INSTALLED_APPS = ["volcano_locks_django", "tests.django.jobs"]
DATABASES = {"default": json.loads(os.environ["JOBS_DATABASE"])}
