"""DynamoDB by two engines: MiniStack, a wheel that is light and quick, and Amazon's own DynamoDB Local, for Java.

The URL names a table that the store makes when it is wanted. MiniStack keeps everything in memory; DynamoDB Local
comes back with its data, unless it is started with ``in_memory=True``, which is ten times quicker.
"""

from __future__ import annotations

import http.client
import json
import sys

from tests.servers import fetching
from tests.servers.base import HOST
from tests.servers.maven import Artifact, java
from tests.servers.process import ASK_SECONDS, ProcessServer

TABLE, REGION = "effectonce", "eu-central-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
LOCAL = Artifact("dynamodb-local", "com.amazonaws", "DynamoDBLocal", "2.6.1")


class DynamoDB(ProcessServer):
    """What both engines have in common."""

    client_environment = CREDENTIALS

    def __init__(self) -> None:
        super().__init__()

    def prepare(self) -> None:
        """Nothing: they make their files themselves."""

    def ask(self) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ASK_SECONDS)
        headers = {
            "Content-Type": "application/x-amz-json-1.0",
            "X-Amz-Target": "DynamoDB_20120810.ListTables",
            "Authorization": f"AWS4-HMAC-SHA256 Credential=test/20200101/{REGION}/dynamodb/aws4_request, "
            "SignedHeaders=host, Signature=0",
        }
        try:
            connection.request("POST", "/", body=b"{}", headers=headers)
            answer = connection.getresponse().read()
        finally:
            connection.close()
        json.loads(answer)["TableNames"]

    @property
    def url(self) -> str:
        return f"dynamodb://{TABLE}?region={REGION}&endpoint=http://{HOST}:{self.port}"


class MiniStack(DynamoDB):
    """DynamoDB by MiniStack, from the wheel ministack."""

    name = "dynamodb"

    @classmethod
    def get(cls) -> None:
        fetching.wheel("ministack")

    def command(self) -> list[str]:
        return [sys.executable, "-m", "ministack"]

    def environment(self) -> dict[str, str]:
        return {
            "GATEWAY_PORT": str(self.port),
            "BIND_HOST": HOST,
            "TMPDIR": str(self.folder),
            "SERVICES": "dynamodb",
        }


class DynamoDBLocal(DynamoDB):
    """DynamoDB Local, from Maven Central; needs Java 17."""

    name = "dynamodb-local"

    def __init__(self, *, in_memory: bool = False) -> None:
        super().__init__()
        self._in_memory = in_memory

    @classmethod
    def get(cls) -> None:
        java()
        LOCAL.libraries()

    def command(self) -> list[str]:
        machine = [str(java()), "-XX:TieredStopAtLevel=1", f"-Djava.library.path={LOCAL.libraries()}"]
        main = ["-cp", f"{LOCAL.libraries()}/*", "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"]
        place = ["-inMemory"] if self._in_memory else ["-dbPath", str(self.folder)]
        options = ["-port", str(self.port), *place, "-sharedDb", "-disableTelemetry"]
        return [*machine, *main, *options]
