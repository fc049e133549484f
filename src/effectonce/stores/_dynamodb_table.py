"""A DynamoDB table: conditional writes, reads, how it is made, and what its errors mean. Knows items, not records.

There are three writes: put an item where there is none, and change or delete one that still is as expected. When the
condition does not hold, the reply carries the item that is there, so that meeting one costs no second request.

Many at once: BatchWriteItem takes no conditions, and a transaction fails as a whole and costs twice. So a batch is one
PartiQL BatchExecuteStatement, in which each of up to 25 statements has a condition and an answer of its own. One
answer is short: an INSERT that meets an item does not say what it met, so those items are read, with one more request
for all of them. Whatever a batch leaves unanswered is sent alone. Transactions are for what has to be done together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from ..errors import MissingExtra, StoreError, StoreMismatch, StoreUnavailable, UsageError
from ._dynamodb_writes import (
    EXPIRY,
    KEY,
    OPERATIONS,
    Drop,
    Item,
    Put,
    Update,
    Where,
    Write,
    request_of,
    statement_of,
)

Outcome = Item | Exception | None
"""Of a write: None when it was done, else the item that is there (empty: none), or what went wrong."""

MOST_WRITES, MOST_READS = 25, 100
"""What DynamoDB takes in one request."""
CONNECTIONS = 64
"""Kept open at most; who comes when all are in use opens one more."""
MAKING_SECONDS = 60
"""How long to wait for a new table."""


class Met(StoreError):
    """A condition did not hold. ``item`` is what is there instead."""

    item: Item


class Cancelled(StoreError):
    """A transaction was not done. ``reasons`` has one for each of its writes."""

    reasons: list[dict[str, Any]]


class Conflict(StoreUnavailable):
    """A transaction that is under way has the item."""


class Denied(StoreUnavailable):
    """These credentials may do other things, but not this."""


class NotThere(StoreUnavailable):
    """There is no such table."""


class InUse(StoreUnavailable):
    """The table is being made by somebody else."""


class Unfit(StoreMismatch):
    """A request that does not fit this table, or this server."""


class Table:
    """One table. Safe to use from any thread; the client is made, and the table looked at, by its first request."""

    def __init__(
        self, name: str, region: str | None, endpoint: str | None, timeout: float, create: bool
    ) -> None:
        try:
            self._boto3: Any = import_module("boto3")
            self._config: Any = import_module("botocore.config").Config
            errors: Any = import_module("botocore.exceptions")
        except ImportError as error:
            raise MissingExtra(
                "DynamoDB needs the package boto3: pip install effectonce[dynamodb]"
            ) from error
        self._refusal, self._trouble = errors.ClientError, errors.BotoCoreError
        self._anonymous = (
            errors.NoCredentialsError,
            errors.PartialCredentialsError,
            errors.CredentialRetrievalError,
        )
        self._region = region or self._session().region_name
        if not self._region:
            raise UsageError(
                f"In which region is the table {name!r}? Write dynamodb://{name}?region=eu-west-1, or set "
                "AWS_DEFAULT_REGION. A local server takes any."
            )
        self.name, self._endpoint, self._timeout, self._create = name, endpoint, timeout, create
        self.place = f"table {name!r} at {endpoint or f'DynamoDB in {self._region}'}"
        self.closed = False
        self.start()

    def start(self) -> None:
        """Begin without a connection, as a forked child must."""
        self._lock = threading.Lock()
        self._client: Any = None
        self._batches = True

    def close(self) -> None:
        """Close the connections. What uses the table afterwards is told so."""
        with self._lock:
            client, self._client, self.closed = self._client, None, True
        if client is not None:
            client.close()

    # One at a time

    def read(self, key: str, *, as_now: bool = True) -> Item:
        """The item as it is now, or for half the price as it may have been just before; empty when there is none."""
        item: Item = self._ask("get_item", Key={KEY: {"S": key}}, ConsistentRead=as_now).get("Item", {})
        return item

    def write(self, write: Write | Update) -> Item | None:
        """Do one write: None, or the item that is there instead."""
        name, request = request_of(write)
        try:
            self._ask(OPERATIONS[name], **request)
        except Met as met:
            return met.item
        return None

    def transact(self, writes: Sequence[Write | Update]) -> dict[str, Item] | None:
        """Do all of some writes, or none: None, or the items that were not as expected, by key.

        No items: another transaction has one of them.
        """
        parts = [{name: {"TableName": self.name, **request}} for name, request in map(request_of, writes)]
        try:
            self._call(self._client or self._open(), "transact_write_items", TransactItems=parts)
        except Cancelled as cancelled:
            both = zip(writes, cancelled.reasons, strict=True)
            return {write.key: why.get("Item", {}) for write, why in both if why["Code"] == UNEXPECTED}
        return None

    def overwrite(self, item: Item) -> None:
        """Put an item, whatever is there."""
        self._ask("put_item", Item=item)

    def delete(self, key: str, where: Where) -> bool:
        """Delete an item that still is as expected: whether it was."""
        return self.write(Drop(key, where)) is None

    def pages(self, start: Item | None = None, **choices: Any) -> Iterator[tuple[list[Item], Item | None]]:
        """The whole table, in no order, a megabyte at a time, and where the next page begins."""
        while True:
            begin = {"ExclusiveStartKey": start} if start else {}
            reply = self._ask("scan", **begin, **choices)
            start = reply.get("LastEvaluatedKey")
            yield reply["Items"], start
            if not start:
                return

    def items_counted(self) -> int:
        """How many items there were when DynamoDB counted them, up to six hours ago."""
        count: int = self._ask("describe_table")["Table"].get("ItemCount", 0)
        return count

    # Many at once

    @property
    def most_at_once(self) -> int:
        """How many writes are worth sending together."""
        return MOST_WRITES if self._batches else 1

    def write_many(self, writes: Sequence[Write]) -> list[Outcome]:
        """Do up to 25 writes to different keys, each for itself."""
        outcomes: list[Outcome] = []
        unseen: list[int] = []
        for index, (write, answer) in enumerate(zip(writes, self._batch(writes), strict=True)):
            error = answer.get("Error", {})
            if not error or error.get("Item"):
                outcomes.append(error.get("Item"))
            elif error["Code"] in ("DuplicateItem", "ConditionalCheckFailed"):
                outcomes.append({})
                unseen.append(index)
            else:
                outcomes.append(self._alone(write))
        found = self.read_many([writes[index].key for index in unseen]) if unseen else {}
        for index in unseen:
            write = writes[index]
            item = found.get(write.key, {})
            outcomes[index] = self._alone(write) if isinstance(write, Put) and not item else item
        return outcomes

    def read_many(self, keys: Sequence[str], *, as_now: bool = True) -> dict[str, Item]:
        """Items by key; those that are not there are left out."""
        found: dict[str, Item] = {}
        for first in range(0, len(keys), MOST_READS):
            asked = [{KEY: {"S": key}} for key in dict.fromkeys(keys[first : first + MOST_READS])]
            request = {self.name: {"Keys": asked, "ConsistentRead": as_now}}
            reply = self._call(self._client or self._open(), "batch_get_item", RequestItems=request)
            left = reply.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", [])
            items: list[Item] = reply["Responses"].get(self.name, [])
            items += [item for key in left if (item := self.read(key[KEY]["S"], as_now=as_now))]
            found.update((item[KEY]["S"], item) for item in items)
        return found

    def _batch(self, writes: Sequence[Write]) -> list[dict[str, Any]]:
        statements = [statement_of(self.name, write) for write in writes]
        unanswered = [{"Error": {"Code": "Unanswered"}}] * len(writes)
        try:
            reply = self._call(self._client or self._open(), "batch_execute_statement", Statements=statements)
            answers: list[dict[str, Any]] = reply["Responses"]
            return answers
        except (Denied, Unfit):  # PartiQL has permissions of its own; without them it is one write at a time
            self._batches = False
            return unanswered

    def _alone(self, write: Write) -> Outcome:
        try:
            return self.write(write)
        except StoreError as error:
            return error

    # The table itself

    def make(self) -> None:
        """Make the table if it is not there, and have DynamoDB delete what has expired. May be done again."""
        with self._opening():
            client = self._client or self._connect()
            try:
                self._check(client)
            except NotThere:
                self._make(client)
            self._let_expire(client)
            self._client = client

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """One at a time; who waits does so for no longer than for any other answer."""
        if not self._lock.acquire(timeout=self._timeout):
            raise StoreUnavailable(f"The {self.place} is still being opened by another thread.")
        try:
            yield
        finally:
            self._lock.release()

    def _open(self) -> Any:
        with self._opening():
            if self._client is None:
                client = self._connect()
                try:
                    self._check(client)
                except NotThere as missing:
                    if not self._create:
                        raise
                    try:
                        self._make(client)
                    except Denied as denied:
                        raise NotThere(f"{missing} These credentials may not create it.") from denied
                    self._let_expire(client)
                except Denied:
                    pass  # who may use a table need not be allowed to look at it
                self._client = client
            return self._client

    def _connect(self) -> Any:
        if self.closed:
            raise StoreUnavailable("The store is closed.")
        config = self._config(  # connecting and waiting for an answer, twice, take the whole time-out
            connect_timeout=self._timeout * 0.1,
            read_timeout=self._timeout * 0.4,
            retries={"mode": "legacy", "total_max_attempts": 2},
            max_pool_connections=CONNECTIONS,
            parameter_validation=False,
            # One that is not put together again for every request, which takes a tenth of its time.
            user_agent=f"effectonce Boto3/{self._boto3.__version__}",
        )
        try:
            session = self._session(region_name=self._region)
            return session.client("dynamodb", endpoint_url=self._endpoint, config=config)
        except (ValueError, self._trouble) as error:
            raise StoreUnavailable(f"boto3 can't be used for the {self.place}: {error}") from error

    def _session(self, **choices: Any) -> Any:
        try:
            return self._boto3.Session(**choices)
        except self._trouble as error:
            raise UsageError(f"boto3 can't be set up: {error}") from error

    def _check(self, client: Any) -> None:
        """Look whether there is a table and that it is ours; another program's is not touched."""
        table = self._call(client, "describe_table", TableName=self.name)["Table"]
        keys = [(key["AttributeName"], key["KeyType"]) for key in table["KeySchema"]]
        types = {named["AttributeName"]: named["AttributeType"] for named in table["AttributeDefinitions"]}
        if keys != [(KEY, "HASH")] or types[KEY] != "S":
            raise StoreMismatch(
                f"The {self.place} is another program's: its key is {', '.join(name for name, _ in keys)}, ours is the "
                f"string {KEY}. Give effectonce a table of its own."
            )
        if table["TableStatus"] == "CREATING":
            self._wait_for(client)

    def _make(self, client: Any) -> None:
        with suppress(InUse):  # another process is making it
            self._call(
                client,
                "create_table",
                TableName=self.name,
                BillingMode="PAY_PER_REQUEST",
                KeySchema=[{"AttributeName": KEY, "KeyType": "HASH"}],
                AttributeDefinitions=[{"AttributeName": KEY, "AttributeType": "S"}],
            )
        self._wait_for(client)

    def _let_expire(self, client: Any) -> None:
        described = self._call(client, "describe_time_to_live", TableName=self.name)["TimeToLiveDescription"]
        if described["TimeToLiveStatus"] not in ("ENABLED", "ENABLING"):
            expiry = {"Enabled": True, "AttributeName": EXPIRY}
            with suppress(Unfit):  # another process was quicker
                self._call(client, "update_time_to_live", TableName=self.name, TimeToLiveSpecification=expiry)

    def _wait_for(self, client: Any) -> None:
        pace = {"Delay": 1, "MaxAttempts": MAKING_SECONDS}
        try:
            client.get_waiter("table_exists").wait(TableName=self.name, WaiterConfig=pace)
        except self._trouble as error:
            raise StoreUnavailable(f"The {self.place} is still being made.", retry_after=5.0) from error

    # Errors

    def _ask(self, operation: str, **request: Any) -> dict[str, Any]:
        return self._call(self._client or self._open(), operation, TableName=self.name, **request)

    def _call(self, client: Any, operation: str, **request: Any) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = getattr(client, operation)(**request)
            self._check_whole(reply)
            return reply
        except self._refusal as error:
            self._check_whole(error.response)
            raise self._refused(error.response) from error
        except self._anonymous as error:
            local = " A local server takes any, but wants some." if self._endpoint else ""
            raise StoreUnavailable(
                f"There are no AWS credentials for the {self.place}. {HOW_TO_BE_KNOWN}{local}"
            ) from error
        except self._trouble as error:
            raise StoreUnavailable(f"The {self.place} can't be reached: {type(error).__name__}.") from error

    def _check_whole(self, reply: dict[str, Any]) -> None:
        """A reply that breaks off within its headers is taken for an empty one, and would say that nothing is there."""
        headers = reply["ResponseMetadata"]["HTTPHeaders"]
        if not headers.keys() & {"content-length", "transfer-encoding"}:
            raise StoreUnavailable(f"A reply of the {self.place} broke off. Ask again with the same key.")

    def _refused(self, response: dict[str, Any]) -> StoreError:
        code, why = response["Error"]["Code"], response["Error"].get("Message", "")
        if code == "ConditionalCheckFailedException":
            met = Met()
            met.item = response.get("Item", {})
            return met
        if code == "TransactionCanceledException":
            cancelled = Cancelled()
            cancelled.reasons = response.get("CancellationReasons", [])
            others = [why for why in cancelled.reasons if why["Code"] not in LOOK_AGAIN]
            if cancelled.reasons and not others:
                return cancelled
            code, why = (others[0]["Code"], others[0].get("Message", "")) if others else (code, why)
        status = response["ResponseMetadata"].get("HTTPStatusCode", 500)
        unknown = TROUBLE if status >= 500 else REFUSED
        kind, text = MEANINGS.get(code, unknown)
        return kind(text.format(place=self.place, code=code, why=why))


UNEXPECTED = "ConditionalCheckFailed"
LOOK_AGAIN = ("None", UNEXPECTED, "TransactionConflict")
"""Why writes in a transaction were not done, if it is not for trouble."""
HOW_TO_MAKE = (
    f"Let effectonce create it (create=yes), or create it with the string {KEY!r} as its partition key and {EXPIRY!r} "
    "as its time-to-live attribute; and look whether its name and region are right."
)
HOW_TO_BE_KNOWN = (
    "boto3 finds them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in ~/.aws or its machine's role."
)
Meaning = tuple[type[StoreError], str]
THROTTLED: Meaning = (
    StoreUnavailable, "The {place} is throttled ({code}). Ask again, or give it more capacity.",
)  # fmt: skip
UNKNOWN_CALLER: Meaning = (
    StoreUnavailable, f"The {{place}} refuses these AWS credentials, or this clock ({{code}}). {HOW_TO_BE_KNOWN}",
)  # fmt: skip
DENIED: Meaning = (
    Denied, "These AWS credentials are not allowed to do what effectonce does with the {place}: {why}",
)  # fmt: skip
TROUBLE: Meaning = (StoreUnavailable, "The {place} has trouble ({code}). Ask again.")
UNFIT: Meaning = (Unfit, "The {place} refused a request that does not fit it: {why}")
CONFLICT: Meaning = (
    Conflict,
    "A transaction that is under way has what was asked of the {place}. Ask again.",
)
REFUSED: Meaning = (StoreUnavailable, "The {place} refused a request ({code}): {why}")
MEANINGS: dict[str, Meaning] = {
    "AccessDenied": DENIED,
    "AccessDeniedException": DENIED,
    "ExpiredTokenException": UNKNOWN_CALLER,
    "IncompleteSignature": UNKNOWN_CALLER,
    "InvalidClientTokenId": UNKNOWN_CALLER,
    "InvalidSignatureException": UNKNOWN_CALLER,
    "LimitExceededException": THROTTLED,
    "MissingAuthenticationTokenException": UNKNOWN_CALLER,
    "ProvisionedThroughputExceeded": THROTTLED,
    "ProvisionedThroughputExceededException": THROTTLED,
    "RequestLimitExceeded": THROTTLED,
    "ResourceInUseException": (InUse, "The {place} is being made or changed. Ask again."),
    "ResourceNotFoundException": (NotThere, f"There is no {{place}}. {HOW_TO_MAKE}"),
    "SignatureDoesNotMatch": UNKNOWN_CALLER,
    "ThrottlingError": THROTTLED,
    "ThrottlingException": THROTTLED,
    "TransactionConflictException": CONFLICT,
    "TransactionInProgressException": CONFLICT,
    "UnknownOperationException": (Denied, "The {place} does not know one of DynamoDB's requests: {why}"),
    "UnrecognizedClientException": UNKNOWN_CALLER,
    "ValidationError": UNFIT,
    "ValidationException": UNFIT,
}
