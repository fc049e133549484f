"""Servers for Java: what runs them, and what Maven Central has of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from tests.servers import debian, fetching

POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>effectonce</groupId>
  <artifactId>{name}</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>{group}</groupId>
      <artifactId>{artifact}</artifactId>
      <version>{version}</version>
    </dependency>
  </dependencies>
</project>
"""


def java() -> Path:
    """What runs them."""
    return debian.installed("java", package="openjdk-17-jre-headless")


class Artifact(NamedTuple):
    """A server, as Maven Central names it."""

    name: str
    """What it is called here."""
    group: str
    artifact: str
    version: str

    def libraries(self) -> Path:
        """The folder with the server and what it needs."""
        return fetching.cached(f"{self.name}-{self.version}", self._get) / "lib"

    def _get(self, folder: Path) -> None:
        project = folder / "pom.xml"
        project.write_text(POM.format_map(self._asdict()))
        if not shutil.which("mvn"):
            debian.install("mvn", package="maven")
        goal = ["dependency:copy-dependencies", "-DoutputDirectory=lib"]
        fetching.run(f"getting {self.name}", "mvn", "--batch-mode", "--file", str(project), *goal)
