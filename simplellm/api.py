"""LLM: a model on a device, its engine in a thread, and the calls that generate with it. `docs/api.md` tells all of it."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from simplellm.config import EngineConfig, suggest
from simplellm.engine.scheduler import Request
from simplellm.engine.start import start
from simplellm.errors import RequestError
from simplellm.generation import Answer, Generation, Job, Stream
from simplellm.request import Event, Sampling
from simplellm.text.reader import TextReader
from simplellm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

BUILTIN = Path(__file__).parent / "builtin"
END_TOKENS = ("<|return|>", "<|call|>", "<|endoftext|>")  # old downloads' generation_config.json lacks <|call|>
MANY = 16  # prompts from which a progress bar is shown

_SAMPLING = tuple(f.name for f in dataclasses.fields(Sampling))


class LLM:
    """gpt-oss from a checkpoint folder. Options: `EngineConfig`. Use `stop()`, or a `with` block, to free the device."""

    def __init__(self, path: str | Path | None = None, **options: Any):
        """path: a folder in the official layout; None: the small built-in model."""
        self.path = Path(path) if path is not None else BUILTIN
        self.options = EngineConfig.from_options(**options)
        self.tokenizer = Tokenizer.from_file(tokenizer_file(self.path))  # first: a missing one is known in a moment
        ends = {self.tokenizer.special[name] for name in END_TOKENS if name in self.tokenizer.special}
        self._engine = start(self.path, self.options, frozenset(ends))
        self.config = self._engine.model_config
        self._rids = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, cache_salt: str = "", **sampling: Any
    ) -> Generation:
        """Generate for one prompt (text or token ids) or for many; returns at once.

        `sampling`: the fields of `Sampling`, each one value for all prompts or a list with one per prompt. The result is
        always a list of Outputs, in prompt order. Raises RequestError before anything is queued if a prompt or a setting
        is invalid, naming both.
        """
        job = self._job(prompts, priority, cache_salt, sampling)
        many = self.options.progress and len(job.answers) >= MANY
        bar = tqdm(total=sum(map(len, job.answers)), unit=" answers", disable=None) if many else None
        generation = Generation(job, bar)
        self._submit(job, generation.on_event)
        return generation

    def stream(self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0, cache_salt: str = "", **sampling: Any) -> Stream:
        """The same as `generate`, in pieces as they come, for `for` and `async for`."""
        job = self._job(prompts, priority, cache_salt, sampling)
        stream = Stream(job)
        self._submit(job, partial(_feed, weakref.ref(stream)))
        return stream

    def stop(self) -> None:
        """End the engine and free the device; what is pending fails with EngineError."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _submit(self, job: Job, sink: Any) -> None:
        self._engine.worker.submit([answer.request for row in job.answers for answer in row], sink)

    def _job(self, prompts: Any, priority: int, cache_salt: str, sampling: Mapping[str, Any]) -> Job:
        """Check everything, queue nothing."""
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError("priority", f"{priority!r} is not a whole number")
        if not isinstance(cache_salt, str):
            raise RequestError("cache_salt", f"{cache_salt!r} is not a string")
        listed = prompt_list(prompts)
        settings = sampling_list(sampling, len(listed))
        many = not (isinstance(prompts, str) or listed[0] is prompts)
        rows = []
        for index, (prompt, setting) in enumerate(zip(listed, settings, strict=True)):
            try:
                rows.append(self._answers(index, prompt, setting, priority, cache_salt))
            except RequestError as error:
                raise error.at(index) if many else error from None
        return Job(rows, self._engine.worker.abort)

    def _answers(self, index: int, prompt: Prompt, sampling: Sampling, priority: int, salt: str) -> list[Answer]:
        """One prompt's requests: n of them, sharing the prompt's pages."""
        sampling.check(self.config.vocab_size)
        ids = prompt_ids(prompt, self.tokenizer, self.config.vocab_size)
        self._engine.scheduler.check(len(ids))
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        now, answers = time.monotonic(), []
        rids = [next(self._rids) for _ in range(sampling.n)]
        for choice, rid in enumerate(rids):
            own = sampling if choice == 0 else dataclasses.replace(sampling, prompt_logprobs=None)
            request = Request(
                rid,
                ids,
                own,
                seed + choice,
                priority=priority,
                cache_salt=salt,
                group=rids[0] if len(rids) > 1 else None,
            )
            answers.append(Answer(index, choice, request, TextReader(self.tokenizer.decoder(), sampling.stop), now))
        return answers


def _feed(stream: weakref.ref[Stream], event: Event) -> None:
    """A stream that its reader dropped takes nothing in; its end cancels the requests."""
    if (alive := stream()) is not None:
        alive.on_event(event)


def tokenizer_file(path: Path) -> Path:
    """The checkpoint's tokenizer.json; OpenAI's `original/` folder has it one level up."""
    inside, above = path / "tokenizer.json", path.parent / "tokenizer.json"
    return above if path.is_dir() and not inside.exists() and above.exists() else inside


def prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt (a string, or a list of ids) or a list of them -> a list of prompts, at least one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError("prompts", f"{type(prompts).__name__} is neither text, token ids nor a list of such")
    if not prompts:
        raise RequestError("prompts", "an empty list")
    if all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def prompt_ids(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a prompt, text or ids, checked."""
    if isinstance(prompt, str):
        ids = tuple(tokenizer.encode(prompt))
    elif isinstance(prompt, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        ids = tuple(prompt)
    else:
        raise RequestError("prompt", f"{type(prompt).__name__} is neither text nor a list of token ids")
    if not ids:
        raise RequestError("prompt", "is empty: at least 1 token is needed")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError("prompt", f"token id {token} is outside the vocabulary of {vocab_size}")
    return ids


def sampling_list(sampling: Mapping[str, Any], num_prompts: int) -> list[Sampling]:
    """One Sampling per prompt from keywords whose values are one for all or a list of one per prompt."""
    for name in sampling:
        if name not in _SAMPLING:
            raise RequestError(name, f"no such setting; {suggest(name, _SAMPLING)}")
    columns = {name: _column(name, value, num_prompts) for name, value in sampling.items()}
    return [Sampling(**{name: column[i] for name, column in columns.items()}) for i in range(num_prompts)]


def _column(name: str, value: Any, num_prompts: int) -> list[Any]:
    """`value` for each prompt. A list of strings (stop) or of ids (stop_token_ids) is itself one value."""
    single = {"stop": str, "stop_token_ids": int}.get(name)
    listed = isinstance(value, list) and not (single and all(isinstance(item, single) for item in value))
    if not listed:
        return [_one(name, value)] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(name, f"a list of {len(value)} values for {num_prompts} prompts")
    return [_one(name, item) for item in value]


def _one(name: str, value: Any) -> Any:
    if name in ("stop", "stop_token_ids"):
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else value
    return {} if name == "logit_bias" and value is None else value
