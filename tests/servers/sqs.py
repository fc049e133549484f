"""SQS by MiniStack, from the wheel ministack. It keeps everything in memory."""

from __future__ import annotations

import sys
import urllib.request

from tests.servers import fetching
from tests.servers.base import HOST
from tests.servers.dynamodb import CREDENTIALS, REGION
from tests.servers.process import ASK_SECONDS, ProcessServer


class SQS(ProcessServer):
    """SQS by MiniStack, from the wheel ministack."""

    name = "sqs"
    client_environment = CREDENTIALS

    @classmethod
    def get(cls) -> None:
        fetching.wheel("ministack")

    def prepare(self) -> None:
        """Nothing: it makes its files itself."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "ministack"]

    def environment(self) -> dict[str, str]:
        place = {"GATEWAY_PORT": str(self.port), "BIND_HOST": HOST, "TMPDIR": str(self.folder)}
        return {**place, "SERVICES": "sqs"}

    def ask(self) -> None:
        request = f"http://{HOST}:{self.port}/?Action=ListQueues&Version=2012-11-05"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential=test/20200101/{REGION}/sqs/aws4_request"}
        with urllib.request.urlopen(
            urllib.request.Request(request, headers=headers), timeout=ASK_SECONDS
        ) as answer:
            if b"ListQueuesR" not in answer.read():
                raise ConnectionError("SQS isn't ready yet")

    @property
    def url(self) -> str:
        return f"sqs://?region={REGION}&endpoint=http://{HOST}:{self.port}"
