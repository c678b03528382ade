"""Answer over HTTP: a JSON API and a page to record, compare, enrol and recognise voices.

Listens on this machine alone unless --host is another address; then requests need a token, from --token-file, the
variable SPEAKERNET_TOKEN, or generated and printed at the start. Audio is never kept; the store holds embeddings.
"""

import argparse
from pathlib import Path

from speakernet.cli import MODEL, store_key

ARGUMENTS = {
    **MODEL,
    "--store": {"type": Path, "metavar": "FILE", "help": "file of enrolled people (default: none are kept)"},
    "--key-file": {"type": Path, "metavar": "FILE", "help": "the store's key (default: SPEAKERNET_STORE_KEY)"},
    "--host": {"default": "127.0.0.1", "help": "address to listen on (default %(default)s)"},
    "--port": {"type": int, "default": 8000, "help": "0 takes any (default %(default)s)"},
    "--in-browser": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "pages run the model by themselves and send no recording; the folder `dist` of onnxruntime-web",
    },
    "--token-file": {"type": Path, "metavar": "FILE", "help": "file with the token of every request"},
}


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    # Late: --help needs no torch; and only who serves needs these libraries.
    from speakernet.inference.serve.server import start

    if arguments.in_browser is None:
        return start(arguments, store_key(arguments))
    # Late: it needs the libraries that export models.
    from speakernet.assembly.in_browser import page_files

    return start(arguments, store_key(arguments), page_files(arguments.model, arguments.in_browser))
