"""What the kernel tests share: how near is near enough, and how to break a kernel on purpose."""

import importlib.util
import itertools
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

_numbers = itertools.count()


def close(got: torch.Tensor, want: torch.Tensor, plain: torch.Tensor) -> None:
    """The kernel's error is at most twice that of plain bf16: want in float32, plain in bf16, both by the twin."""
    assert not got.isnan().any(), f"{int(got.isnan().sum())} of {got.numel()} are NaN"
    error, allowed = (float((x.double() - want.double()).norm() / want.double().norm()) for x in (got, plain))
    assert error <= 2 * allowed + 1e-6, f"error {error:.2e}, plain bf16 has {allowed:.2e}"


def broken(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of the module with the source text `old` replaced by `new`: its tests must reject it."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source, f"{old!r} is not in {module.__file__}"
    path = Path(tempfile.mkdtemp()) / f"broken_{next(_numbers)}_{Path(module.__file__).name}"
    path.write_text(source.replace(old, new))  # a file, since Triton reads the source of its kernels from one
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = copy
    spec.loader.exec_module(copy)
    return copy
