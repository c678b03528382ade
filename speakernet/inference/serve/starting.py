"""`speakernet serve`: from its arguments to a running server."""

import argparse

from speakernet.inference.serve.limits import Limits
from speakernet.inference.serve.running import Address, read_token, serve
from speakernet.inference.serve.service import Service
from speakernet.inference.verifier import load


def start(arguments: argparse.Namespace) -> int:
    """Load the model, open the store, answer requests until told to stop.

    Raises:
        ValueError: what cannot be loaded or opened, an address that cannot be had, or a token that can be guessed.
    """
    address = Address(arguments.host, arguments.port)
    token = read_token(address, arguments.token_file)
    verifier = load(arguments.model, arguments.device)
    store = None
    if arguments.store is not None:
        key = arguments.key_file.read_text(encoding="utf-8").strip() if arguments.key_file else None
        store = verifier.people(arguments.store, key)
    try:
        return serve(Service(verifier, store, Limits()), address, token)
    finally:
        if store is not None:
            store.close()
