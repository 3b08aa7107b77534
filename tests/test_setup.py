"""setup.sh, run for real in a copy, with a fake nvidia-smi, a fake venv and a PATH that holds nothing else.

No test installs or downloads anything: the fake venv's `python` logs what pip was asked for.
"""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "bash",
    "basename",
    "cat",
    "chmod",
    "cksum",
    "dirname",
    "grep",
    "head",
    "mkdir",
    "rm",
    "timeout",
    "gcc",
)
CLOSED = "http://127.0.0.1:9"  # nobody listens on the discard port

VENV = '''
import pathlib, sys
bin = pathlib.Path(sys.argv[1]) / "bin"
bin.mkdir(parents=True)
(bin / "python").write_text("""{python}""")
(bin / "hf").write_text("""{hf}""")
for path in bin.iterdir():
    path.chmod(0o755)
sys.exit({code})
'''
PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m pip --version") exit 0 ;;
  "-m pip install "*)
    echo "$*" >>pip.txt
    if [[ "$*" == *"$FAIL_ON"* && -n $FAIL_ON ]]; then echo "ERROR: $FAIL_WITH" >&2; exit 1; fi ;;
  "-m pytest"*) echo "$*" ;;
  *) exec REAL "$@" ;;
esac
"""
HF = """#!/usr/bin/env bash
printf '%s\\\\n' "$@" >hf.txt
mkdir -p "$4"
exit "${HF_CODE:-0}"
"""


class Sandbox:
    """A checkout of setup.sh alone, and the little that it finds on PATH."""

    def __init__(self, path: Path):
        self.root, self.bin, self.modules = path / "tree", path / "bin", path / "modules"
        for folder in (self.root, self.bin, self.modules):
            folder.mkdir()
        for name in ("setup.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        for name in COMMANDS:
            if found := shutil.which(name):
                (self.bin / name).symlink_to(found)
        self.env = {
            "PATH": str(self.bin),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(self.modules),
            "TORCH_INDEX": CLOSED,
        }

    def command(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def fake_venv(self, code: int = 0) -> None:
        (self.modules / "venv").mkdir()
        (self.modules / "venv" / "__init__.py").touch()
        script = VENV.format(python=PYTHON.replace("REAL", sys.executable), hf=HF, code=code)
        (self.modules / "venv" / "__main__.py").write_text(script)

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "setup.sh", *args],
            env=self.env | env,
            cwd=self.root,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def pip(self) -> list[str]:
        """What pip was asked for since the last call."""
        log = self.root / "pip.txt"
        asked = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.removeprefix("-m pip install ") for line in asked]


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.fixture
def index() -> Iterator[str]:
    """The address of a PyTorch index that answers."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


CPU, CUDA13, CUDA128 = "2.13.0, CPU build", "2.11.0 with triton 3.6.0, CUDA 13.0", "2.11.0 with triton 3.6.0, CUDA 12.8"
CARDS = [
    ("NVIDIA H100 80GB HBM3, 580.95.05, 9.0", CUDA13, []),
    ("NVIDIA H200, 575.57.08, 9.0", CUDA128, []),
    ("NVIDIA H100 PCIe, 550.90.07, 9.0", CPU, ["550.90.07 is too old", "driver 570 or later"]),
    ("NVIDIA A100-SXM4-80GB, 580.95.05, 8.0", CUDA13, ["A100-SXM4-80GB (compute capability 8.0) is not a Hopper GPU"]),
    ("NVIDIA A100-SXM4-80GB, 535.1, 8.0", CPU, ["535.1 is too old", "is not a Hopper GPU"]),
    ("NVIDIA T400, 580.1, 7.5\\nNVIDIA H200, 580.1, 9.0", CUDA13, []),  # the card that can run the kernels decides
]


@pytest.mark.parametrize("line, torch, notes", CARDS)
def test_the_card_and_its_driver_choose_torch(sandbox: Sandbox, line: str, torch: str, notes: list[str]) -> None:
    sandbox.command("nvidia-smi", f"printf '{line}\\n'")
    out = sandbox.run("--dry-run").stdout
    assert f"torch    {torch}: NVIDIA" in out
    assert ("extras   gpu,server" in out) == (torch != CPU)
    assert all(note in out for note in notes) and ("note " in out) == bool(notes)


@pytest.mark.parametrize("body", ["exit 9", "echo No devices were found", "exit 0"])
def test_a_broken_nvidia_smi_counts_as_no_gpu(sandbox: Sandbox, body: str) -> None:
    sandbox.command("nvidia-smi", body)
    assert f"torch    {CPU}: nvidia-smi is here, but lists no GPU" in sandbox.run("--dry-run").stdout


def test_a_dry_run_makes_nothing_and_may_stand_anywhere(sandbox: Sandbox) -> None:
    before = sorted(sandbox.root.iterdir())
    for args in (
        ["--dry-run"],
        ["test", "--dry-run", "-k", "x"],
        ["--dry-run", "demo"],
        ["./gpt-oss-20b/", "--dry-run"],
    ):
        done = sandbox.run(*args)
        assert done.returncode == 0 and f"torch    {CPU}: no NVIDIA GPU found" in done.stdout
    assert f"openai/gpt-oss-20b to {sandbox.root}/./gpt-oss-20b" in done.stdout
    assert sorted(sandbox.root.iterdir()) == before


@pytest.mark.parametrize("args", [["dmeo"], ["--frob"], ["demo", "x"], ["./gpt-oss-13b"], ["./gpt-oss-20b", "test"]])
def test_an_unknown_argument_is_refused(sandbox: Sandbox, args: list[str]) -> None:
    done = sandbox.run(*args)
    assert done.returncode == 1 and f"unknown argument '{args[-1]}'" in done.stderr and not done.stdout


def test_a_python_that_fails_is_passed_over(sandbox: Sandbox) -> None:
    """A version manager's shim may be on PATH and not run; an older Python may be the first that does."""
    sandbox.command("python3.12", "exit 127")
    sandbox.command("python3.11", "printf '3.10.2\\n/usr\\nyes\\nyes\\n'")
    sandbox.command("python3", f'exec {sys.executable} "$@"')
    assert f"python   {sandbox.bin}/python3 (" in sandbox.run("--dry-run", PYTHON="").stdout
    sandbox.command("python3.13", f'exec {sys.executable} "$@"')
    assert f"python   {sandbox.bin}/python3.13 (" in sandbox.run("--dry-run", PYTHON="").stdout


def test_without_a_python_the_apt_line_names_one(sandbox: Sandbox) -> None:
    assert "apt-get install -y python3 python3-venv" in sandbox.run(PYTHON="").stderr
    sandbox.command("apt-cache", "[[ $2 == python3.11-venv ]]")
    assert "apt-get install -y python3.11 python3.11-venv" in sandbox.run(PYTHON="").stderr
    refused = sandbox.run(PYTHON="/no/such/python")
    assert refused.returncode == 1 and "/no/such/python does not run" in refused.stderr


def test_what_the_system_lacks_is_named_before_anything_is_made(sandbox: Sandbox) -> None:
    lacking = "import sys, sysconfig\nsys.modules['ensurepip'] = None\nsysconfig.get_path = lambda name: '/nowhere'\n"
    (sandbox.modules / "sitecustomize.py").write_text(lacking)
    (sandbox.bin / "gcc").unlink()
    minor = f"python3.{sys.version_info[1]}"
    done = sandbox.run("demo")  # on a CPU nothing is compiled
    assert done.returncode == 1 and f"apt-get install -y {minor}-venv\n" in done.stderr
    done = sandbox.run("test")
    assert f"apt-get install -y {minor}-venv gcc libc6-dev {minor}-dev\n" in done.stderr
    assert not (sandbox.root / ".venv").exists()


def test_a_failed_venv_is_removed_and_a_strange_one_is_kept(sandbox: Sandbox) -> None:
    sandbox.fake_venv(code=1)
    done = sandbox.run()
    assert done.returncode == 1 and ".venv has been removed" in done.stderr
    assert not (sandbox.root / ".venv").exists()
    (sandbox.root / ".venv").mkdir()
    assert "was not made by setup.sh" in sandbox.run().stderr
    assert (sandbox.root / ".venv").is_dir()


def test_torch_comes_from_the_configured_indexes_first(sandbox: Sandbox) -> None:
    sandbox.fake_venv()
    done = sandbox.run()
    assert done.returncode == 0, done.stderr
    assert sandbox.pip() == ["torch==2.13.0+cpu", "--editable .[server]"]


NO_TORCH = {"FAIL_ON": "install torch==2.13.0+cpu", "FAIL_WITH": "No matching distribution found for torch==2.13.0+cpu"}


def test_then_from_the_cpu_index_for_torch_alone(sandbox: Sandbox, index: str) -> None:
    sandbox.fake_venv()
    assert sandbox.run(TORCH_INDEX=index, **NO_TORCH).returncode == 0
    assert sandbox.pip() == ["torch==2.13.0+cpu", f"--index-url {index}/cpu torch==2.13.0+cpu", "--editable .[server]"]


@pytest.mark.parametrize("message", [NO_TORCH["FAIL_WITH"], "ResolutionImpossible: for help visit"])
def test_then_from_pypi_with_a_warning(sandbox: Sandbox, message: str) -> None:
    """pip words it in the second way where a constraints file also speaks of torch."""
    sandbox.fake_venv()
    done = sandbox.run(**NO_TORCH | {"FAIL_WITH": message})
    assert done.returncode == 0 and "about 3 GB" in done.stderr
    assert sandbox.pip() == ["torch==2.13.0+cpu", "torch==2.11.0", "--editable .[server]"]


def test_a_failure_that_is_not_a_missing_torch_is_no_reason_for_3_gb(sandbox: Sandbox) -> None:
    sandbox.fake_venv()
    done = sandbox.run(FAIL_ON="torch==2.13.0+cpu", FAIL_WITH="No space left on device")
    assert done.returncode == 1 and "No space left" in done.stderr and "run the same command again" in done.stderr
    assert sandbox.pip() == ["torch==2.13.0+cpu"]


def test_driver_575_without_its_index_does_not_get_cuda_13(sandbox: Sandbox) -> None:
    sandbox.fake_venv()
    sandbox.command("nvidia-smi", "echo NVIDIA H200, 575.57.08, 9.0")
    fail = {"FAIL_ON": "torch==2.11.0+cu128", "FAIL_WITH": "No matching distribution found for torch==2.11.0+cu128"}
    done = sandbox.run(**fail)
    assert done.returncode == 1 and "PyPI's needs driver 580" in done.stderr
    assert sandbox.pip() == ["torch==2.11.0+cu128"]


def test_a_second_run_installs_nothing_and_a_failed_one_never_counts(sandbox: Sandbox) -> None:
    sandbox.fake_venv()
    assert sandbox.run(FAIL_ON="--editable", FAIL_WITH="connection lost").returncode == 1
    assert sandbox.run().returncode == 0
    assert sandbox.pip() == ["torch==2.13.0+cpu", "--editable .[server]"] * 2
    assert sandbox.run().returncode == 0 and sandbox.pip() == []
    assert sandbox.run("test", FAIL_ON="--editable", FAIL_WITH="connection lost").returncode == 1
    done = sandbox.run("test", "-k", "two words")
    assert done.stdout.splitlines()[-1] == "-m pytest -n auto --dist loadfile -k two words"
    assert sandbox.pip() == ["--editable .[test]"] * 2
    assert sandbox.run().returncode == 0 and sandbox.run("test").returncode == 0 and sandbox.pip() == []
    with (sandbox.root / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    assert sandbox.run().returncode == 0 and sandbox.pip() == ["torch==2.13.0+cpu", "--editable .[server]"]


def test_a_venv_that_moved_is_made_anew(sandbox: Sandbox) -> None:
    """Its scripts and the editable install would point at the old place."""
    sandbox.fake_venv()
    assert sandbox.run().returncode == 0
    sandbox.root = sandbox.root.rename(sandbox.root.with_name("moved"))
    sandbox.pip()
    assert "making .venv anew" in sandbox.run().stdout
    assert sandbox.pip() == ["torch==2.13.0+cpu", "--editable .[server]"]


def test_a_model_is_downloaded_beside_the_user(sandbox: Sandbox) -> None:
    sandbox.fake_venv()
    target = f"{sandbox.root}/models/gpt-oss-120b"
    assert sandbox.run("models/gpt-oss-120b/").returncode == 0
    want = ["download", "openai/gpt-oss-120b", "--local-dir", target, "--exclude", "original/*", "--exclude", "metal/*"]
    assert (sandbox.root / "hf.txt").read_text().splitlines() == want


def test_an_unreachable_hub_is_said_plainly(sandbox: Sandbox) -> None:
    sandbox.fake_venv()
    done = sandbox.run("./gpt-oss-20b", HF_CODE="1", HF_ENDPOINT=CLOSED)
    assert done.returncode == 1 and f"the hub at {CLOSED} cannot be reached" in done.stderr
    assert "what came is kept in" in done.stderr and (sandbox.root / "gpt-oss-20b").is_dir()


def test_the_installed_hf_takes_exclude_twice(tmp_path: Path) -> None:
    """hf's option forms have changed before: a usage error exits with 2, a hub out of reach with 1."""
    excludes = ["--exclude", "original/*", "--exclude", "metal/*"]
    done = subprocess.run(
        [
            Path(sys.executable).with_name("hf"),
            "download",
            "openai/gpt-oss-20b",
            "--local-dir",
            tmp_path / "m",
            *excludes,
        ],
        env=os.environ | {"HF_ENDPOINT": CLOSED, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
