"""The tree's own rules, as tests: arrows, sizes, lint, format, types, and an import that leaves the GPU alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_imports, sizes

ROOT = Path(__file__).resolve().parent.parent


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_imports_follow_the_arrows() -> None:
    assert check_imports.violations(ROOT / "simplellm") == []


def test_files_and_functions_keep_their_size() -> None:
    assert [problem for size in sizes.measure_tree(ROOT) for problem in size.problems()] == []


@pytest.mark.parametrize(
    "tool",
    ["ruff check .", "ruff format --check .", "mypy --strict simplellm"],
    ids=lambda tool: tool.replace(" ", "-"),
)
def test_the_tools_are_content(tool: str) -> None:
    done = python("-m", *tool.split())
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_does_not_touch_cuda() -> None:
    code = "import sys, simplellm; torch = sys.modules.get('torch'); assert not (torch and torch.cuda.is_initialized())"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_llm_re_exports_every_public_name() -> None:
    import llm
    import simplellm

    assert "LLM" in simplellm.__all__
    assert {name for name in vars(llm) if not name.startswith("__")} == {n for n in simplellm.__all__ if n[:2] != "__"}
    assert all(getattr(llm, name) is getattr(simplellm, name) for name in simplellm.__all__)


BAD_IMPORTS = {
    "text/harmony.py": "from simplellm.engine import scheduler",
    "engine/rows.py": "import simplellm.text.tokenizer",
    "engine/scheduler.py": "import torch.nn",
    "kernels/moe.py": "def launch():\n    from ..model import gpt_oss",
    "kernels/fast/gemm.py": "from ...model import gpt_oss",
    "model/gpt_oss.py": "from simplellm import api",
    "config.py": "from . import request, __version__",
    "helpers.py": "",
}
GOOD_IMPORTS = {
    "cli.py": "from simplellm import __version__\nfrom simplellm.server import http",
    "api.py": "from . import text, engine\nfrom .errors import CheckpointError",
    "engine/scheduler.py": "import torchless\nfrom .pages import Pages\nfrom simplellm.model import gpt_oss",
    "text/harmony.py": "import text.engine\nfrom simplellm.config import ModelConfig",
    "kernels/fast/gemm.py": "from ..moe import experts\nfrom . import tiles\nimport torch",
}


def make_package(root: Path, files: dict[str, str]) -> Path:
    package = root / "simplellm"
    for room in ("text", "engine", "model", "kernels", "kernels/fast", "server"):
        (package / room).mkdir(parents=True, exist_ok=True)
    for name in ("api.py", "config.py", "errors.py", "request.py"):
        (package / name).touch()
    for name, source in files.items():
        (package / name).write_text(source)
    return package


@pytest.mark.parametrize("name", BAD_IMPORTS)
def test_an_import_against_the_arrows_is_found(tmp_path: Path, name: str) -> None:
    found = check_imports.violations(make_package(tmp_path, {name: BAD_IMPORTS[name]}))
    assert len(found) == 1 and name in found[0]


def test_imports_along_the_arrows_are_not(tmp_path: Path) -> None:
    assert check_imports.violations(make_package(tmp_path, GOOD_IMPORTS)) == []


SOURCE = '''"""A docstring
of two lines."""

# a comment
def f(x):  # five raw lines
    text = f"""one
    {x}
    three"""
    return (text,

            x)
'''


def test_a_code_line_is_one_on_which_a_token_starts(tmp_path: Path) -> None:
    """Docstring 1, def 1, text 1 and `return` to `x)` 2; Python 3.12 also sees `{x}` start on a line of its own."""
    (tmp_path / "a.py").write_text(SOURCE)
    size = sizes.measure(tmp_path / "a.py", tmp_path)
    assert (size.code, size.raw) == (5 + (sys.version_info >= (3, 12)), 11)
    assert list(size.functions.values()) == [7]


@pytest.mark.parametrize(
    "folder, lines, problems",
    [("engine", 60, 0), ("engine", 61, 1), ("kernels", 61, 0), ("kernels", 401, 1), ("engine", 401, 2)],
)
def test_what_is_too_long_is_named(tmp_path: Path, folder: str, lines: int, problems: int) -> None:
    path = tmp_path / "simplellm" / folder / "long.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n" + "    pass\n" * (lines - 1))
    assert len(sizes.measure(path, tmp_path).problems()) == problems
