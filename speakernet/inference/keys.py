"""One reader for the secrets of the user: keys of stores and tokens. Imports no torch."""

import os
from pathlib import Path

from speakernet.files import FileError, open_regular, reading

STORE_KEY_VARIABLE = "SPEAKERNET_STORE_KEY"
LONGEST_SECRET = 4096  # bytes


def read_secret(file: Path | None, variable: str) -> bytes | None:
    """The key or token in a file, without the line end; else that in an environment variable; None without either."""
    if file is None:
        found = os.environ.get(variable)
        return None if found is None else os.fsencode(found)
    expected = f"a regular file that holds the key or token in one line, up to {LONGEST_SECRET} bytes"
    with reading(file, expected), open_regular(file) as content:
        # Editors end a line; whoever writes the file in another way would not find the store again.
        secret = content.read(LONGEST_SECRET + 1).rstrip(b"\r\n")
    if not secret or len(secret) > LONGEST_SECRET:
        raise FileError(f"{file}: {len(secret)} bytes; expected {expected}")
    return secret
