"""Settings: what is special about this shop is at the end."""

import os
from pathlib import Path

from effectonce import Policy

FOLDER = Path(__file__).resolve().parents[1]

SECRET_KEY = os.environ.get("SECRET_KEY", "for demos only")
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "shop.views"
INSTALLED_APPS = ["django.contrib.sessions", "shop"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": FOLDER / "shop.db",
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
    }
}

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    # Below what says who is calling. What is above it also runs for repeats; what is below it does not.
    "effectonce.http.django.IdempotencyMiddleware",
]

EFFECTONCE = {
    "store": os.environ.get("EFFECTONCE_STORE", f"sqlite:///{FOLDER}/effects.db"),
    "scope": "shop.views.shopper",
    # The lease is renewed while a view runs. It is how long the key of a killed process is blocked.
    "policy": Policy.payments(lease="5s"),
    # Who clicks twice wants to see the order, and not that it is being placed.
    "busy": "wait",
}
