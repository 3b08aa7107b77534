"""`python -m tests.cases DIR [DIR or FILE ...]`: a line per case on stdout; exit code 1 if one failed, 2 if a path is bad."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.cases.case import CaseError, files
from tests.cases.kinds import run_file
from tests.cases.models import Models


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found = files([Path(argument) for argument in arguments])
    except CaseError as error:
        print(error, file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    with Models() as models:
        for path in found:
            told = run_file(path, models)
            counts[told.status] += 1
            print(told, flush=True)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())), file=sys.stderr)
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
