"""Makes a case's checks. A check is a function of its entry's keys that returns what is wrong, or raises NotRun."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.cases.case import NotRun

Check = Callable[..., Iterable[str]]
REMARKS = ("check", "note", "why", "alternative")  # keys that nothing is to be done about


def make(expect: Sequence[Mapping[str, Any]], checks: Mapping[str, Check]) -> tuple[list[str], list[str]]:
    """What failed, and what could not be checked. "or" allows something else, as prose: it is shown with a failure."""
    failed: list[str] = []
    missing: list[str] = []
    allowed = [entry["alternative"] for entry in expect if entry["check"] == "or"]
    for entry in expect:
        if entry["check"] == "or":
            continue
        try:
            failed += make_one(entry, checks)
        except NotRun as reason:
            missing.append(str(reason))
    if failed and allowed:
        failed.append(f"(allowed instead, to be judged by a reader: {allowed[0]})")
    return failed, missing


def make_one(entry: Mapping[str, Any], checks: Mapping[str, Check]) -> list[str]:
    """What is wrong by one entry. NotRun if its check, or a key that changes what it means, is unknown."""
    name = entry["check"]
    if name not in checks:
        raise NotRun(f"unknown check {name!r}")
    keys = {key: value for key, value in entry.items() if key not in REMARKS}
    try:
        inspect.signature(checks[name]).bind(**keys)
    except TypeError as error:
        raise NotRun(f"unknown check {name!r} with {', '.join(map(repr, keys)) or 'no keys'} ({error})") from None
    return [f"{name}: {problem}" for problem in checks[name](**keys)]


def compare(seen: Mapping[str, Any], wants: Mapping[str, Any], where: str = "") -> list[str]:
    """Fields of an answer with what they should be: FIELD, FIELD_contains, FIELD_not_contains, no_FIELD_contains."""
    problems = []
    for key, want in wants.items():
        problem = _compare_one(seen, key, want)
        if problem is not None:
            problems.append(where + problem)
    return problems


def _compare_one(seen: Mapping[str, Any], key: str, want: Any) -> str | None:
    if key in seen:
        return None if seen[key] == want else f"{key} is {seen[key]!r}, want {want!r}"
    name = key.removesuffix("_contains")
    negative = name.endswith("_not") or name.startswith("no_")
    name = name.removesuffix("_not").removeprefix("no_")
    if not key.endswith("_contains") or name not in seen:
        raise NotRun(f"unknown check {key!r}")
    every = seen.get(f"{name}s")  # tool_names beside the first call's tool_name
    held = "\n".join(every) if isinstance(every, list) else seen[name] or ""
    texts = want if isinstance(want, list) else [want]
    wrong = [text for text in texts if (text in held) is negative]
    return f"{name} is {held!r}, which has {'' if negative else 'not '}{wrong!r}" if wrong else None
