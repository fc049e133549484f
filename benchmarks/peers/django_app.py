"""The same app on Django behind django-idempotency-key, on Redis: ``gunicorn benchmarks.peers.django_app:application``.

Its own lock across processes is in use; repeats get the first status, which it has to be asked for.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import path

from benchmarks.peers.kitchen import STREAMED, cook, keep, store

settings.configure(
    SECRET_KEY="not a secret",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    DATA_UPLOAD_MAX_MEMORY_SIZE=16 << 20,
    MIDDLEWARE=["idempotency_key.middleware.IdempotencyKeyMiddleware"],
    CACHES={
        "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": store(), "TIMEOUT": int(keep())}
    },
    IDEMPOTENCY_KEY={
        "CONFLICT_STATUS_CODE": None,
        "STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage", "CACHE_NAME": "default"},
        "LOCK": {
            "CLASS": "idempotency_key.locks.redis.MultiProcessRedisLock",
            "LOCATION": store(),
            "NAME": "peers",
            "TTL": 10,
            "ENABLE": True,
            "TIMEOUT": 2.0,
        },
    },
)


def handle(request: Any, what: str) -> HttpResponse:
    """Any endpoint."""
    meal = cook(what, request.GET["n"], request.body)
    response = HttpResponse(meal.body, status=meal.status)
    for name, value in meal.headers:
        response[name] = value
    return response


def stream(_: Any) -> StreamingHttpResponse:
    """The answer in pieces."""
    return StreamingHttpResponse(iter(STREAMED), content_type="text/plain")


urlpatterns = [path("stream", stream), path("<str:what>", handle)]
application = get_wsgi_application()
