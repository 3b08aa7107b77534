"""Prints code lines per file: lines on which a Python token starts, so comments and blanks are free and a
docstring counts once. `python tools/sizes.py` exits with 1 if a file has more than 400 lines of any kind, or a
function of simplellm/ outside kernels/ more than 60.
"""

from __future__ import annotations

import ast
import statistics
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("simplellm", "bench", "evals", "cookbook", "tools", "tests")
MAX_FILE, MAX_FUNCTION = 400, 60  # raw lines
FREE = {
    getattr(tokenize, name)
    for name in (
        "COMMENT",
        "NL",
        "NEWLINE",
        "INDENT",
        "DEDENT",
        "ENCODING",
        "ENDMARKER",
        "FSTRING_MIDDLE",
        "FSTRING_END",
    )
    if hasattr(tokenize, name)  # f-strings are single tokens before Python 3.12
}


@dataclass(frozen=True)
class Size:
    """One file's lines, and the raw lines of each of its functions by name."""

    path: Path
    code: int
    raw: int
    functions: dict[str, int]

    def problems(self) -> list[str]:
        found = [f"{self.path}: {self.raw} lines, limit {MAX_FILE}"] if self.raw > MAX_FILE else []
        if self.path.parts[0] == "simplellm" and "kernels" not in self.path.parts:
            long = {name: lines for name, lines in self.functions.items() if lines > MAX_FUNCTION}
            found += [f"{self.path}: {name} has {n} lines, limit {MAX_FUNCTION}" for name, n in long.items()]
        return found


def measure(path: Path, root: Path) -> Size:
    with tokenize.open(path) as file:
        text = file.read()
    lines = iter(text.splitlines(keepends=True))
    code = {token.start[0] for token in tokenize.generate_tokens(lambda: next(lines, "")) if token.type not in FREE}
    functions = {
        f"{node.name} (line {node.lineno})": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return Size(path.relative_to(root), len(code), len(text.splitlines()), functions)


def measure_tree(root: Path) -> list[Size]:
    paths = [*root.glob("*.py"), *(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))]
    return [measure(path, root) for path in sorted(paths)]


def total(name: str, sizes: Iterable[Size]) -> str:
    rows = list(sizes)
    lengths = [lines for size in rows for lines in size.functions.values()] or [0]
    return (
        f"{sum(s.code for s in rows):6} {sum(s.raw for s in rows):6}  {name}: {len(rows)} files; "
        f"functions: median {statistics.median(lengths):.0f} lines, longest {max(lengths)}"
    )


def main() -> int:
    sizes = measure_tree(Path(__file__).resolve().parent.parent)
    print("  code    raw")
    for size in sizes:
        print(f"{size.code:6} {size.raw:6}  {size.path}")
    for folder in FOLDERS:
        print(total(folder, (size for size in sizes if size.path.parts[0] == folder)))
    print(total("all", sizes))
    problems = [problem for size in sizes for problem in size.problems()]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
