"""Settings of the Django app under test."""

from __future__ import annotations

from tests.http.apps.kitchen import boundary, open_receiver

SECRET_KEY = "nobody's"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.http.apps.django_app"
WSGI_APPLICATION = "tests.http.apps.django_app.application"
MIDDLEWARE = ["effectonce.http.django.IdempotencyMiddleware"]
EFFECTONCE = {"receiver": open_receiver, **boundary()}
