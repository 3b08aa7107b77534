"""The model's shape (from config.json) and the engine's options. Plain data: no torch, nothing global."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simplellm.errors import CheckpointError, OptionError

PAGE = 128  # tokens in a KV page; also the longest window whose keys fit one full page (docs/architecture.md, 2)
ALPHA = 1.702  # SwiGLU's slope: in the reference code, not in any config file (gpt-oss model.py, `swiglu`)

WINDOW, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class ModelConfig:
    """A gpt-oss model's shape. Field names follow Hugging Face's config.json where it has them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int  # rows of one expert's gate; gate_up has twice as many
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int  # keys a query of a window layer sees, itself included
    max_context: int
    rms_norm_eps: float
    swiglu_limit: float
    rope_theta: float
    rope_factor: float  # YaRN
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_context: int
    rope_truncate: bool
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def window_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == WINDOW)

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def page_layers(self) -> int:
        """Layers a page must have room for: it serves either kind."""
        return max(len(self.window_layers), len(self.full_layers))

    def page_bytes(self, itemsize: int = 2) -> int:
        """Bytes of one KV page: K and V of PAGE tokens for the layers of one kind."""
        return self.page_layers * 2 * self.num_kv_heads * PAGE * self.head_dim * itemsize


@dataclass(frozen=True)
class EngineConfig:
    """What a user may choose when starting an engine. `docs/api.md` explains each option."""

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:N"
    dtype: str = "bfloat16"  # where the model rounds: "bfloat16", or "float32" for none but the last
    memory_gb: float | None = None  # weights and KV together; None: what the device has, with headroom
    max_context: int | None = None  # None: the model's own
    max_running: int = 1024  # requests with a row on the device
    token_budget: int = 2048  # tokens of one step, decodes first
    prompt_budget: int | None = None  # the same while more requests wait for a first token than for a next one; None: 16,384
    # on a Hopper GPU, else token_budget
    prefix_cache: bool = True
    penalty_slots: int = 32  # requests with repetition, presence or frequency penalties at once
    lag: int = 1  # steps planned ahead of the last one whose tokens are known: 0 or 1
    num_pages: int | None = None  # overrides memory_gb: the exact number of KV pages
    progress: bool = True  # progress bars while loading and for large batches

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or self.device not in ("auto", "cpu", "cuda") and self.device[:5] != "cuda:":
            raise OptionError(f"device: {self.device!r} is not auto, cpu, cuda or cuda:N")
        if self.dtype not in ("bfloat16", "float32"):
            raise OptionError(f"dtype: {self.dtype!r} is neither bfloat16 nor float32")
        if self.lag not in (0, 1):
            raise OptionError(f"lag: {self.lag!r} is neither 0 nor 1")
        for name in ("prefix_cache", "progress"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name}: {value!r} is neither True nor False")
        for name, least in (
            ("max_running", 1),
            ("token_budget", 1),
            ("prompt_budget", 1),
            ("penalty_slots", 1),
            ("max_context", 2),
            ("num_pages", 4),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_context", "num_pages", "prompt_budget"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise OptionError(f"{name}: {value!r} is not a whole number")
            if value < least:
                raise OptionError(f"{name}: {value} is below {least}")
        if self.memory_gb is not None and not (isinstance(self.memory_gb, (int, float)) and 0 < self.memory_gb <= 1e6):
            raise OptionError(f"memory_gb: {self.memory_gb!r} is not above 0 and at most 1e6")

    @property
    def idle_budget(self) -> int:
        """Tokens of a step while prompts come first."""
        return max(self.token_budget, self.prompt_budget or 0)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from keywords; an unknown one is an error that suggests the near one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise OptionError(f"unknown option {name!r}; {suggest(name, known)}")
        return cls(**options)


def suggest(name: str, known: Sequence[str]) -> str:
    """What to say of a name that is not known: the near one, or all of them."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, or a CheckpointError that names the file and what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: download the model again, or check the path") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object: download it again")
    return data
