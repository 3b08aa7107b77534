"""Checks, from the syntax tree, that imports inside simplellm/ go one way (docs/architecture.md, "The tree").

    cli, server -> api -> text, engine -> model -> kernels;   the vocabulary lies below all

`python tools/check_imports.py` prints each import against the arrows and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = {"request", "config", "errors"}
# What a room may import besides itself. `text` and `engine` meet only in `api`.
BELOW_MODEL = VOCABULARY | {"kernels", "parallel"}
BELOW_API = BELOW_MODEL | {"text", "engine", "model"}
BELOW_CLI = BELOW_API | {"arguments", "generation", "info", "bench", "demo", "terminal", "api", "server", "__init__"}
ALLOWED = {
    "__main__": {"cli"},
    "cli": BELOW_CLI,
    "server": BELOW_CLI - {"server"},
    "__init__": VOCABULARY | {"api", "generation"},
    "api": BELOW_API | {"arguments", "generation"},
    "arguments": VOCABULARY | {"text"},  # the half of api that reads what callers pass
    "info": BELOW_API,  # what cli prints about a checkpoint
    "bench": BELOW_API | {"__init__"},  # what cli measures
    "demo": BELOW_API | {"api", "generation", "terminal"},  # the chat that types by itself
    "terminal": BELOW_API | {"api", "generation"},  # the chat that cli starts
    "generation": BELOW_API,  # the half of api in which engine and text meet: a call's results
    "engine": BELOW_MODEL | {"model"},
    "model": BELOW_MODEL,
    "text": VOCABULARY,
    "kernels": VOCABULARY,
    "parallel": VOCABULARY,
    **{word: VOCABULARY for word in VOCABULARY},
}
# Plain Python, testable in microseconds: these must not import torch.
NO_TORCH = (
    "__init__",
    "request",
    "config",
    "errors",
    "text",
    "engine.scheduler",
    "engine.pages",
    "engine.prefix_cache",
)


def module_name(path: Path, package: Path) -> str:
    """`simplellm/engine/rows.py` -> `engine.rows`; a package's `__init__` stands for the package."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(tree: ast.AST, package: str, depth: int) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import; `depth` is how many packages the file lies in, `package` counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            # Within the top package or out of a room: the room is named. Deeper: it is the file's own.
            if node.level == depth:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                yield from ((node.lineno, f"{package}.{name}") for name in names)
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            yield from ((node.lineno, f"{package}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def target_room(name: str, package: Path) -> str | None:
    """The room an absolute name belongs to; None outside the package."""
    top, *rest = name.split(".")
    if top != package.name:
        return None
    is_room = rest and ((package / rest[0]).is_dir() or (package / f"{rest[0]}.py").is_file())
    return rest[0] if is_room else "__init__"


def violations(package: Path) -> list[str]:
    """One line for each import against the arrows, and for each room that has none."""
    found = []
    for path in sorted(package.rglob("*.py")):
        name = module_name(path, package)
        room = name.split(".")[0]
        if room not in ALLOWED:
            found.append(f"{path}: no arrow for {room!r}; add it to tools/check_imports.py and docs/architecture.md")
            continue
        depth = len(path.relative_to(package).parts)
        for line, target in imported(ast.parse(path.read_text(encoding="utf-8")), package.name, depth):
            other = target_room(target, package)
            if other not in (None, room) and other not in ALLOWED[room]:
                found.append(f"{path}:{line}: {room} must not import {other} ({target})")
            if target.split(".")[0] == "torch" and any(name == m or name.startswith(m + ".") for m in NO_TORCH):
                found.append(f"{path}:{line}: {name} must not import torch")
    return found


def main() -> int:
    found = violations(Path(__file__).resolve().parent.parent / "simplellm")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
