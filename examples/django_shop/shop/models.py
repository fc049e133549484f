"""What the shop has, and what it has sold."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import F


class Item(models.Model):
    """Something to buy."""

    name = models.CharField(max_length=40, unique=True)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    stock = models.PositiveIntegerField()


class Order(models.Model):
    """Something bought."""

    number = models.CharField(max_length=64, primary_key=True)
    shopper = models.CharField(max_length=64)
    item = models.ForeignKey(Item, on_delete=models.PROTECT)
    quantity = models.PositiveIntegerField()
    total = models.DecimalField(max_digits=10, decimal_places=2)

    @classmethod
    @transaction.atomic
    def place(cls, number: str, shopper: str, item: Item, quantity: int) -> Order:
        """Take from the stock and write the order. A number that is there has been placed: nothing is taken again."""
        order, is_new = cls.objects.get_or_create(
            number=number,
            defaults={"shopper": shopper, "item": item, "quantity": quantity, "total": item.price * quantity},
        )
        left = Item.objects.filter(pk=item.pk, stock__gte=quantity)
        if is_new and not left.update(stock=F("stock") - quantity):
            raise ValidationError("Sold out.")
        return order
