"""Packages of other people that some tests need, and no other part."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def installed(package: str) -> Any:
    """The package. Without it the test is skipped, but fails if the extra `test` names it: then it must be there."""
    extra = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["optional-dependencies"]["test"]
    name = {"agents": "openai-agents"}.get(package, package.replace("_", "-"))
    wanted = any(line.startswith(name) for line in extra)
    return importlib.import_module(package) if wanted else pytest.importorskip(package)
