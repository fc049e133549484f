"""Atomic mode inside ``transaction.atomic``, told as one story; run in a process of its own, which has its settings."""

from __future__ import annotations

import json
import sys
from typing import Any

import django
from django.conf import settings
from django.db import connection, models, transaction

from effectonce import Message, Policy, Receiver
from effectonce.errors import UsageError


class Declined(Exception):
    """An error that is a result."""


def main(database: dict[str, Any], store_url: str) -> None:
    """Every step says what it shows."""
    settings.configure(DATABASES={"default": database}, INSTALLED_APPS=[], USE_TZ=True)
    django.setup()

    class Payment(models.Model):
        id = models.CharField(max_length=50, primary_key=True)

        class Meta:
            app_label = "shop"

    receiver = Receiver(store_url, policy=Policy(remember=(Declined,)))
    receiver.get("nothing")
    with connection.schema_editor() as editor:
        editor.create_model(Payment)

    def pay(message: Message) -> str:
        Payment.objects.create(id=message.id)
        if "declined" in message.id:
            raise Declined(message.id)
        if "twice" in message.id:
            Payment.objects.create(id=message.id)
        return message.id

    def process(id: str) -> Any:
        return receiver.on(connection).process(Message(id=id), pay)

    # 1. Without atomic() it is an error that explains.
    try:
        process("a")
        raise SystemExit("autocommit was taken")
    except UsageError as error:
        assert "transaction.atomic()" in str(error), error

    # 2. Commit, and a repeat.
    for replayed in (False, True):
        with transaction.atomic():
            outcome = process("a")
            assert (outcome.replayed, outcome.value, outcome.guarantee) == (replayed, "a", "atomic"), outcome
    assert Payment.objects.count() == 1

    # 3. A rollback removes record and effect.
    class Changed(Exception): ...

    try:
        with transaction.atomic():
            process("b")
            raise Changed
    except Changed:
        pass
    with transaction.atomic():
        assert process("b").attempt == 1
    assert Payment.objects.filter(id="b").count() == 1

    # 4. A remembered error undoes the effect and is committed; the block around it goes on.
    for _ in range(2):
        with transaction.atomic():
            try:
                process("declined")
                raise SystemExit("not declined")
            except Declined:
                pass
            Payment.objects.update_or_create(id="after")
    assert not Payment.objects.filter(id="declined").exists()
    assert Payment.objects.filter(id="after").exists()

    # 5. An error of the database in a handler does not spoil the block.
    with transaction.atomic():
        try:
            process("twice")
            raise SystemExit("made twice")
        except django.db.IntegrityError:
            pass
        Payment.objects.create(id="unspoilt")
    assert not Payment.objects.filter(id="twice").exists()
    assert Payment.objects.filter(id="unspoilt").exists()

    # 6. Nested blocks are savepoints: what was processed in one goes with it.
    with transaction.atomic():
        try:
            with transaction.atomic():
                process("c")
                raise Changed
        except Changed:
            pass
        assert process("c").status == "executed"
    assert Payment.objects.filter(id="c").count() == 1

    # 7. A batch, and what waits for the commit.
    heard: list[str] = []
    with transaction.atomic():
        messages = [Message(id=id) for id in ("d", "declined2", "e", "d")]
        outcomes = receiver.on(connection).process_batch(messages, pay)
        assert [outcome.status for outcome in outcomes] == ["executed", "failed", "executed", "replayed"], (
            outcomes
        )
        transaction.on_commit(lambda: heard.append("committed"))
    assert heard == ["committed"]
    assert Payment.objects.filter(id__in=["d", "e"]).count() == 2
    with connection.schema_editor() as editor:
        editor.delete_model(Payment)
    receiver.close()
    print("told to its end")


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
