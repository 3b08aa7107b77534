"""One way to launch a kernel: with programmatic dependent launch, or, without a GPU, to compile it for sm_90 only.

Inside `compiling()` tensors are on the "meta" device and nothing runs; Triton's cache is filled with what a Hopper GPU will
ask for (the key holds source, options and versions, not the machine), and the list says what was compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)

_built: list[Compiled] | None = None  # the list of the innermost `compiling`


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, pdl: bool = True, **options: Any) -> None:
    """kernel[grid](*args), or compile it. `options`: constexprs, num_stages, maxnreg. The kernel must call gdc_wait if pdl."""
    if _built is None:
        kernel[grid](*args, num_warps=num_warps, launch_pdl=pdl, **options)
    else:
        done = kernel.warmup(*args, grid=grid, num_warps=num_warps, launch_pdl=pdl, **options)
        _built.append(Compiled(kernel.__name__, done, num_warps))


@cache
def num_sms() -> int:
    """Multiprocessors of the GPU at hand; an H200's where there is none."""
    return (
        torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if torch.cuda.is_available()
        else 132
    )


class Compiled:
    """A kernel as the card would run it."""

    def __init__(self, name: str, kernel: Any, num_warps: int):
        self.name, self.num_warps, self.kernel = name, num_warps, kernel
        self.shared: int = kernel.metadata.shared  # bytes
        self._cubin: bytes = kernel.asm["cubin"]

    @cached_property
    def sass(self) -> list[str]:
        """Instructions without addresses, in order."""
        return re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", self._dump("-sass"))

    @cached_property
    def registers(self) -> int:
        return int(self._usage[0])

    @cached_property
    def stack(self) -> int:
        """Bytes of local memory a thread: spills, or an array with an index known at run time only."""
        return int(self._usage[1])

    def count(self, pattern: str) -> int:
        """Instructions that the regular expression is found in."""
        return sum(bool(re.search(pattern, instruction)) for instruction in self.sass)

    @cached_property
    def _usage(self) -> tuple[str, str]:
        found = re.search(r"REG:(\d+) STACK:(\d+)", self._dump("--dump-resource-usage"))
        assert found is not None
        return found[1], found[2]

    def _dump(self, option: str) -> str:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self._cubin)
            file.flush()
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


class _Stub:
    """As much of Triton's driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "meta"

    def get_benchmarker(self) -> Callable[..., Any]:
        raise AssertionError("nothing is timed here")


@cache
def _stub() -> _Stub:
    return _Stub()


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Compile instead of launching, for sm_90; yields the list of what was compiled."""
    global _built
    built, active = _built, driver._active
    _built = []
    driver.set_active(_stub())
    try:
        yield _built
    finally:
        _built = built
        driver._active = active
