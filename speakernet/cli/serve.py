"""Serve a JSON API and a web page over HTTP to record, compare, enrol and recognise voices.

Listens on this machine only, unless --host is a different address; then requests need a token,
which is generated and printed unless --token-file or the variable SPEAKERNET_TOKEN gives one. Audio
is never kept; the store holds embeddings.
"""

import argparse
from pathlib import Path

from speakernet.cli.shared import MODEL, store_key

ARGUMENTS = {
    **MODEL,
    "--store": {
        "type": Path,
        "metavar": "FILE",
        "help": "store of enrolled people (default: nobody is kept)",
    },
    "--key-file": {
        "type": Path,
        "metavar": "FILE",
        "help": "the store's key (default: SPEAKERNET_STORE_KEY)",
    },
    "--host": {"default": "127.0.0.1", "help": "address to listen on (default %(default)s)"},
    "--port": {
        "type": int,
        "default": 8000,
        "help": "port; 0 picks a free one (default %(default)s)",
    },
    "--in-browser": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "run the model in the page, which then sends no recording; FOLDER is `dist` of "
        "onnxruntime-web",
    },
    "--token-file": {
        "type": Path,
        "metavar": "FILE",
        "help": "file with the token that requests need",
    },
}


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    # Late: --help needs neither torch nor the server's libraries.
    from speakernet.inference.serve.server import serve

    # With --in-browser the page runs the model itself: recordings never leave the visitor's
    # machine, but the visitor gets the weights.
    if arguments.in_browser is None:
        return serve(arguments, store_key(arguments))
    # Late: it needs the export libraries.
    from speakernet.assembly.exchange import NUM_COMPARED
    from speakernet.corpora.synthetic.speech import SAMPLE_RATE, synthetic_speech
    from speakernet.inference.serve.in_browser import page_files

    # Synthetic voices need no files and are enough to compare a graph with its network.
    speech = synthetic_speech(NUM_COMPARED, SAMPLE_RATE)
    files = page_files(arguments.model, arguments.in_browser, speech)
    return serve(arguments, store_key(arguments), files)
