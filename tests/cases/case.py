"""A case file, read and checked for its form, and the verdict on it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEEDS = ("none", "any_model", "scripted_model", "gpt_oss", "gpu")


class CaseError(Exception):
    """A file that is no case, and why."""


class NotRun(Exception):
    """What is missing to run a case, or to make one of its checks."""


@dataclass(frozen=True)
class Case:
    """What a file says. `kind` and `needs` are told in `_format.json`."""

    id: str
    kind: str
    needs: str
    input: dict[str, Any]
    expect: list[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    status: str  # "pass", "fail", "not run"
    id: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.status:8} {self.id}" + (f": {self.why}" if self.why else "")


def files(paths: Sequence[Path]) -> list[Path]:
    """The case files among these: files as they are, folders' *.json but for those that begin with an underscore."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise CaseError(f"{path} does not exist: name a folder of case files, or such files")
        found += sorted(path.glob("[!_]*.json")) if path.is_dir() else [path]
    if not found:
        raise CaseError(f"no *.json in {', '.join(map(str, paths))}")
    return found


def load(path: Path) -> Case:
    """Read a case; CaseError says what is wrong with the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CaseError(f"is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise CaseError("is not a JSON object")
    for name, kind in (("id", str), ("kind", str), ("needs", str), ("input", dict), ("expect", list)):
        if name not in data:
            raise CaseError(f"has no {name!r}")
        if not isinstance(data[name], kind):
            raise CaseError(f"{name!r} is {data[name]!r}, not a {kind.__name__}")
    if data["needs"] not in NEEDS:
        raise CaseError(f"needs {data['needs']!r}, which is not one of {', '.join(NEEDS)}")
    if not data["expect"]:
        raise CaseError("expects nothing")
    for number, entry in enumerate(data["expect"]):
        if not isinstance(entry, dict) or not isinstance(entry.get("check"), str):
            raise CaseError(f"expect[{number}] names no check")
    return Case(data["id"], data["kind"], data["needs"], data["input"], data["expect"])


def verdict(case: Case, failed: Iterable[str], missing: Iterable[str]) -> Verdict:
    """A failed check counts for more than one that could not be made."""
    failed, missing = list(failed), list(dict.fromkeys(missing))
    status = "fail" if failed else "not run" if missing else "pass"
    return Verdict(status, case.id, "; ".join(failed or missing))
