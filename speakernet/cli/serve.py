"""Answer over HTTP: a JSON API and a page to record, compare, enrol and recognise voices.

Listens on this machine alone unless --host is another address; then requests need a token, from --token-file, the
variable SPEAKERNET_TOKEN, or generated and printed at the start. Audio is never kept; the store holds embeddings.
"""

import argparse
from pathlib import Path

from speakernet.cli import missing_extra, store_key

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the store and the address."""
    parser.add_argument("--model", required=True, help="a model file, such as exps/exp01/best.pt")
    parser.add_argument("--store", type=Path, metavar="FILE", help="file of enrolled people (default: none are kept)")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="the store's key (default: SPEAKERNET_STORE_KEY)")
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes any (default %(default)s)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token of every request")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        # Late: --help needs no torch; and only who serves needs these libraries.
        from speakernet.inference.serve.server import start
    except ModuleNotFoundError as error:
        raise missing_extra("serving", "serve", error) from error
    return start(arguments, store_key(arguments))
