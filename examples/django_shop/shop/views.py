"""The pages of the shop, and an API for its app.

A form can't send headers. So the page gives each form a key in a hidden field, and ``form_key`` finds it: however often
the button is clicked, it is one order. The app sends the header Idempotency-Key, as clients of APIs do.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs

from asgiref.sync import sync_to_async
from django import forms
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from effectonce import current, keys
from effectonce.http import Request
from effectonce.http.django import idempotent

from .models import Item, Order


def shopper(request: Request) -> str | None:
    """Who is calling, and so whose keys these are. Whoever has no session gets 403.

    A name kept in the session, and not the session's own key: that is as good as a password, has no business in logs,
    and is what the caller's cookie says, true or not, until the session is looked up.
    """
    return request.raw.session.get("shopper")


def form_key(request: Request, body: bytes) -> str | None:
    """The key in a form's hidden field."""
    return parse_qs(body.decode("utf-8", "replace")).get("key", [None])[0]


def front(request: HttpRequest) -> HttpResponse:
    """Everything there is to buy, each with a key for the next order."""
    if "shopper" not in request.session:
        request.session["shopper"] = keys.uuid7()
    return render(request, "shop.html", {"items": Item.objects.all(), "key": keys.uuid7()})


class Basket(forms.Form):
    """What may be ordered."""

    item = forms.ModelChoiceField(Item.objects, to_field_name="name")
    quantity = forms.IntegerField(min_value=1, max_value=10)


def place(shopper: str, data: Any) -> Order:
    """Place an order, or say by a ValidationError why not."""
    basket = Basket(data)
    if not basket.is_valid():
        raise ValidationError("An order has an item of ours, and a quantity from 1 to 10.")
    # The number is the same on every attempt, also on one that takes over from a killed process.
    return Order.place(current().key_for("order"), shopper, **basket.cleaned_data)


@require_POST
@idempotent(key=form_key)
def checkout(request: HttpRequest) -> HttpResponse:
    """Place an order and show it. Every click on one form leads to the same order."""
    try:
        order = place(request.session["shopper"], request.POST)
    except ValidationError as refusal:
        return HttpResponse(refusal.message, status=400)
    return redirect("order", number=order.number)


@csrf_exempt
@require_POST
@idempotent(keep="7d")
async def api_order(request: HttpRequest) -> HttpResponse:
    """Place an order from the app."""
    try:
        order = await sync_to_async(place)(request.session["shopper"], json.loads(request.body))
    except (ValidationError, ValueError) as refusal:
        return JsonResponse({"error": getattr(refusal, "message", "Send JSON.")}, status=400)
    return JsonResponse({"number": order.number, "total": str(order.total)}, status=201)


def order(request: HttpRequest, number: str) -> HttpResponse:
    """One order."""
    found = get_object_or_404(Order, number=number, shopper=request.session.get("shopper"))
    return HttpResponse(f"{found.quantity} x {found.item.name}: {found.total}")


urlpatterns = [
    path("", front),
    path("checkout", checkout),
    path("orders/<number>", order, name="order"),
    path("api/orders", api_order),
]
