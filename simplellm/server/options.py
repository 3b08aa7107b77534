"""The command line of `simplellm serve`: options -> Settings. Imports nothing that takes long."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from simplellm.errors import OptionError
from simplellm.server.settings import MAX_BODY_MB, Settings, model_names

BUILTIN = Path(__file__).resolve().parent.parent / "builtin"
KEY_VARIABLE = "SIMPLELLM_API_KEY"
TLS = ("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_ciphers")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the server may be told, besides the engine's options."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine alone can connect)")
    add("--port", type=int, default=8000, help="0: any free one (default 8000)")
    add(
        "--served-model-name", action="append", default=[], metavar="NAME", help="what requests call the model; may be repeated"
    )
    add("--api-key-file", metavar="FILE", help=f"keys, one a line; or one key in ${KEY_VARIABLE}")
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help="CORS: pages that may ask; * for all")
    add("--allow-host", action="append", default=[], metavar="NAME", help="a name of this server, as in Host")
    add("--max-running", type=int, default=1024, help="requests that run at once (default 1024)")
    add("--max-queue", type=int, default=1024, help="requests that may wait (default 1024)")
    add("--max-body-mb", type=float, default=MAX_BODY_MB)
    add("--drain-s", type=float, default=30.0, help="seconds that answers may take after SIGTERM (default 30)")
    for name in TLS:
        add("--" + name.replace("_", "-"), metavar="X", help="as uvicorn's")


def settings(args: argparse.Namespace, path: str | None) -> Settings:
    """path: None is the built-in model. Raises OptionError."""
    if not 0 <= args.port < 1 << 16:
        raise OptionError(f"port: {args.port} is not between 0 and 65535")
    if args.max_queue < 0 or args.max_body_mb <= 0 or args.drain_s < 0:
        raise OptionError("max_queue and drain_s must be at least 0, max_body_mb above 0")
    folder = BUILTIN if path is None else Path(path)
    return Settings(
        path=folder,
        names=tuple(args.served_model_name) or model_names(folder),
        host=args.host,
        port=args.port,
        keys=read_keys(args.api_key_file),
        origins=tuple(args.allow_origin),
        hosts=tuple(args.allow_host),
        max_queue=args.max_queue,
        max_body_mb=args.max_body_mb,
        drain_s=args.drain_s,
        tls=tls(args),
    )


def read_keys(file: str | None) -> tuple[str, ...]:
    """Keys from the file and the environment: never from the command line, which other users can read."""
    given = [os.environ.get(KEY_VARIABLE, "")]
    if file is not None:
        try:
            given += Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"api_key_file: cannot read {file} ({error})") from None
    keys = tuple(filter(None, map(str.strip, given)))
    if file is not None and not keys:
        raise OptionError(f"api_key_file: {file} holds no key")
    return keys


def tls(args: argparse.Namespace) -> dict[str, Any]:
    """uvicorn's options, checked as far as a server would otherwise fail after loading a model."""
    chosen = {name: value for name in TLS if (value := getattr(args, name)) is not None}
    if chosen and "ssl_certfile" not in chosen:
        raise OptionError("ssl_certfile: TLS needs a certificate")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        if name in chosen and not Path(chosen[name]).is_file():
            raise OptionError(f"{name}: there is no file {chosen[name]}")
    return chosen
