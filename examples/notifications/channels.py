"""Three ways to tell a customer. Each says a key with what it sends, so that its receiver knows a repetition."""

from __future__ import annotations

import json
import os
import smtplib
from collections.abc import Callable
from email.message import EmailMessage
from typing import Any
from urllib.request import Request, urlopen

SMTP_PORT = int(os.environ.get("SMTP_PORT", "2525"))
SINKS = os.environ.get("SINKS", "http://127.0.0.1:8000")
PATIENCE_SECONDS = 10.0

Order = dict[str, Any]


def email(order: Order, key: str) -> None:
    """A letter. Mail servers know one by its Message-ID."""
    letter = EmailMessage()
    letter["Message-ID"] = f"<{key}@shop.example>"
    letter["From"], letter["To"] = "shop@shop.example", f"{order['customer']}@example.com"
    letter["Subject"] = f"Your order {order['order']}"
    letter.set_content(f"Thank you. We charged {order['cents'] / 100:.2f} EUR.")
    with smtplib.SMTP("127.0.0.1", SMTP_PORT, timeout=PATIENCE_SECONDS) as server:
        server.send_message(letter)


def sms(order: Order, key: str) -> None:
    """A text message, through a provider's API."""
    _post("sms", f"Order {order['order']} is on its way", key)


def push(order: Order, key: str) -> None:
    """A notification on the phone, through a provider's API."""
    _post("push", f"{order['order']}: thank you", key)


def _post(channel: str, text: str, key: str) -> None:
    body = json.dumps({"text": text}).encode()
    request = Request(f"{SINKS}/{channel}", body, {"Idempotency-Key": f'"{key}"'})
    with urlopen(request, timeout=PATIENCE_SECONDS):  # raises when the answer is no success
        pass


CHANNELS: dict[str, Callable[[Order, str], None]] = {"email": email, "sms": sms, "push": push}
