"""The command `simplellm`: generate, chat, serve, demo, info, bench. A user's error is one line on stderr and exit 1."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simplellm import __version__
from simplellm.errors import OptionError, SimpleLLMError
from simplellm.server import options as server_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        return int(args.run(args) or 0)
    except SimpleLLMError as error:
        print(f"simplellm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe left, as `head` does
        sys.stderr.close()
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simplellm", description="Inference for gpt-oss-20b and gpt-oss-120b.")
    parser.add_argument("--version", action="version", version=f"simplellm {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is loaded and how long it takes")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a text, streaming")
    generate.add_argument("prompt", help="the text; - reads standard input")
    _add_engine_options(generate)
    generate.add_argument("--max-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--stop", action="append", default=[], help="end before this text; may be repeated")
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk with the model")
    chat.add_argument("path", nargs="?", metavar="PATH", help="a checkpoint folder, as --model")
    _add_engine_options(chat)
    chat.add_argument("--effort", metavar="X", help="reasoning effort: low, medium (default) or high")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument("--tools", metavar="FILE", help="a JSON list of OpenAI's tool definitions; you type the results")
    chat.add_argument("--max-tokens", type=int, help="of one answer (default: what the context has room for)")
    chat.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    chat.add_argument("--top-p", type=float, default=1.0)
    chat.add_argument("--seed", type=int)
    chat.set_defaults(run=_chat)

    serve = commands.add_parser("serve", help="OpenAI's HTTP API; docs/server.md")
    serve.add_argument("path", nargs="?", metavar="PATH", help="a checkpoint folder, as --model")
    _add_engine_options(serve)
    server_options.add_options(serve)
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="three questions to the built-in model, reasoning shown")
    demo.set_defaults(run=_demo)

    _add_bench(commands)

    compile_ = commands.add_parser("compile", help="fill the kernels' compile cache for a model, with or without a GPU")
    compile_.add_argument("path", help="a checkpoint folder; its config.json is enough")
    compile_.set_defaults(run=_compile)

    info = commands.add_parser("info", help="a checkpoint's shapes, bytes, and what fits in a GPU's memory")
    info.add_argument("path")
    info.add_argument("--memory-gb", type=float, help="GPU memory (default: 80 and 141)")
    info.set_defaults(run=_info)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="a checkpoint folder (default: the small built-in model)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--memory-gb", type=float, help="for weights and KV together")
    parser.add_argument("--max-context", type=int)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure, and compare with what the machine can do; ends in JSON")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    host = kinds.add_parser("host", help="microseconds of plan and commit per step")
    host.set_defaults(run=_bench_host)
    decode = kinds.add_parser("decode", help="tokens per second of workloads, and where a step's time goes")
    decode.add_argument("--work", action="append", default=[], metavar="NxPxM", help="sequences x prompt x new tokens; repeat")
    decode.add_argument("--kernels", action="store_true", help="a table of each workload's kernels (GPU)")
    decode.set_defaults(run=_bench_decode)
    prefill = kinds.add_parser("prefill", help="time to the first token of one prompt")
    prefill.add_argument("--prompt", action="append", default=[], type=int, metavar="TOKENS", help="repeat for several")
    prefill.set_defaults(run=_bench_prefill)
    for kind in (decode, prefill):
        kind.add_argument("--passes", type=int, default=5, help="at most (decode: until two agree within 3 %%)")
        kind.add_argument("--token-budget", type=int, help="tokens of one step")
    serve = kinds.add_parser("serve", help="requests that arrive: the engine alone, behind its server, or any server")
    _add_bench_serve(serve)
    for kind in (decode, prefill, serve):
        kind.add_argument("path", nargs="?", metavar="PATH", help="a checkpoint folder, as --model")
        kind.add_argument("--max-running", type=int, default=1024)
        _add_engine_options(kind)


def _add_bench_serve(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    lengths = "TOKENS, LOW-HIGH (uniform) or lognormal:MEDIAN:SIGMA[:MOST]"
    add("--url", action="append", default=[], help="measure this server too (without PATH: alone); repeat for several")
    add("--both", action="store_true", help="the engine alone, then behind `simplellm serve`, and the ratio")
    add("--num", type=int, default=256, help="requests (default 256)")
    add("--rate", type=float, metavar="R", help="a second, at random moments (Poisson); default: all at once")
    add("--prompt", default="1024", metavar="LENGTHS", help=f"{lengths}; default 1024")
    add("--new", default="256", metavar="LENGTHS", help="tokens to generate, as --prompt; default 256")
    add("--seed", type=int, default=1, help="of arrivals, lengths and prompts")
    add("--trace", type=Path, metavar="FILE", help="replay it: a line of JSON per request, as --save-trace writes them")
    add("--save-trace", type=Path, metavar="FILE", help="write the trace that is measured")
    add("--passes", type=int, default=2, help="of the trace with fresh prompts; the last one counts (default 2)")
    add("--vocab", type=int, metavar="N", help="prompts hold ids below it (default: the model's at PATH, else 199000)")
    serve.set_defaults(run=_bench_serve)


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("device", "dtype", "memory_gb", "max_context")
    return {name: getattr(args, name) for name in names}


def _generate(args: argparse.Namespace) -> None:
    from simplellm.api import LLM

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    with LLM(args.model, **_engine_options(args)) as llm:
        _show(llm, prompt, **{name: getattr(args, name) for name in names})


def _chat(args: argparse.Namespace) -> int:
    from simplellm import terminal

    path = _path(args)
    sampling = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    chosen = {"tools": args.tools, "effort": args.effort, "system": args.system}
    return terminal.run(path, _engine_options(args), sampling=sampling, **chosen)


def _serve(args: argparse.Namespace) -> int:
    from simplellm.server import serve

    options = _engine_options(args) | {"max_running": args.max_running}
    return serve.serve(server_options.settings(args, _path(args)), options)


def _path(args: argparse.Namespace) -> str | None:
    """The checkpoint's folder, from either way to say it."""
    if args.path and args.model:
        raise OptionError(f"model: PATH is {args.path} and --model is {args.model}, give one of them")
    path: str | None = args.path or args.model
    return path


def _demo(args: argparse.Namespace) -> int:
    from simplellm import demo

    return demo.run()


def _show(llm: Any, prompt: str, **sampling: Any) -> None:
    """Stream one answer to stdout, then its speed to stderr."""
    began, first, num_tokens = time.perf_counter(), 0.0, 0
    for chunk in llm.stream(prompt, **sampling):
        first = first or time.perf_counter()
        num_tokens += len(chunk.token_ids)
        print(chunk.text, end="", flush=True)
    ended = time.perf_counter()
    rate = (num_tokens - 1) / (ended - first) if num_tokens > 1 else 0.0
    print(flush=True)
    print(f"[{num_tokens} tokens, first after {first - began:.3f} s, then {rate:.1f} tokens per second]", file=sys.stderr)


def _bench_host(args: argparse.Namespace) -> None:
    from simplellm.bench.host import bench_host

    bench_host()


def _bench_options(args: argparse.Namespace) -> dict[str, Any]:
    budget = {} if args.token_budget is None else {"token_budget": args.token_budget}
    return _engine_options(args) | {"max_running": args.max_running} | budget


def _bench_decode(args: argparse.Namespace) -> None:
    from simplellm.bench.decode import bench_decode
    from simplellm.bench.work import Work

    works = [Work.parse(text) for text in args.work or ["1x1024x512"]]
    bench_decode(_folder(args), works, _bench_options(args), args.passes, args.kernels)


def _bench_prefill(args: argparse.Namespace) -> None:
    from simplellm.bench.decode import bench_prefill

    bench_prefill(_folder(args), args.prompt or [1024], _bench_options(args), args.passes)


def _bench_serve(args: argparse.Namespace) -> int:
    from simplellm.bench.serve import Asked, bench_serve

    alone = args.url and not args.both and _path(args) is None
    names = ("both", "num", "rate", "prompt", "new", "seed", "trace", "passes", "vocab")
    chosen = {name: getattr(args, name) for name in names}
    asked = Asked(None if alone else _folder(args), tuple(args.url), save=args.save_trace, **chosen)
    return bench_serve(asked, _engine_options(args) | {"max_running": args.max_running})


def _folder(args: argparse.Namespace) -> Path:
    from simplellm.api import BUILTIN

    path = _path(args)
    return BUILTIN if path is None else Path(path)


def _compile(args: argparse.Namespace) -> None:
    from simplellm.config import EngineConfig
    from simplellm.model.checkpoint import load_config

    config = load_config(Path(args.path))
    try:
        from simplellm.engine.compiling import compile_kernels
    except ModuleNotFoundError as error:
        raise OptionError(
            f"compile: needs triton, which is not installed ({error}): pip install 'simplellm-engine[gpu]'"
        ) from None
    began = time.perf_counter()
    built = compile_kernels(config, EngineConfig())
    seconds = time.perf_counter() - began
    print(f"{len(built)} launches of {len({kernel.name for kernel in built})} kernels compiled in {seconds:.1f} s")


def _info(args: argparse.Namespace) -> None:
    from simplellm.info import describe

    print(describe(args.path, args.memory_gb))
