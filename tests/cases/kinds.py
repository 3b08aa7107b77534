"""Which function runs which kind of case, and what each case waits for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.cases import harmony, offline, over_http, processes, render
from tests.cases.case import Case, CaseError, NotRun, Verdict, load
from tests.cases.models import Models

KINDS: dict[str, Callable[[Case, Models], Verdict]] = {
    "harmony_tokens": harmony.run,
    "render": render.run,
    "python": offline.run,
    **dict.fromkeys(over_http.KINDS, over_http.run),
    "process": processes.run,
}


def run_file(path: Path, models: Models) -> Verdict:
    """One file's verdict. A file that is no case fails; so does a case whose input lacks what its kind needs."""
    try:
        case = load(path)
    except CaseError as error:
        return Verdict("fail", path.name, str(error))
    return run(case, models)


def run(case: Case, models: Models) -> Verdict:
    """One case's verdict."""
    if needs := _missing(case):
        return Verdict("not run", case.id, needs)
    try:
        return KINDS[case.kind](case, models)
    except NotRun as reason:
        return Verdict("not run", case.id, str(reason))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        return Verdict("fail", case.id, f"the runner cannot read its input or checks: {error!r}")


def _missing(case: Case) -> str:
    """What is not here that a case needs, or nothing."""
    needs = ["needs gpt_oss weights"] if case.needs == "gpt_oss" else []
    if case.needs == "gpu" and not torch.cuda.is_available():
        needs.append("needs a GPU")
    if not needs and case.kind not in KINDS:
        needs.append(f"unknown kind {case.kind!r}")
    return ", ".join(needs)
