"""Without a GPU: every kernel that the engine would launch compiles for Hopper, in the engine's own calls and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplellm.api import BUILTIN
from simplellm.cli import main
from simplellm.config import EngineConfig
from simplellm.engine.compiling import compile_kernels
from simplellm.model.checkpoint import load_config


def test_every_launch_of_an_engine_compiles_without_spills() -> None:
    built = compile_kernels(load_config(BUILTIN), EngineConfig(max_running=16, max_context=2048))
    names = {kernel.name for kernel in built}
    assert len(names) > 15 and {"norm_kernel", "_race", "embed_kernel", "clear_kernel", "_receive", "_send"} <= names
    different = {id(kernel.kernel): kernel for kernel in built}.values()
    spilling = {kernel.name: kernel.stack for kernel in different if kernel.stack}
    assert spilling == {}


def test_the_command_says_what_it_compiled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compile", str(tmp_path)]) == 1
    assert "is empty: download the model again" in capsys.readouterr().err
