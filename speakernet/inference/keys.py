"""Encryption of embeddings with a key of the user's: AES-GCM, its key derived from a passphrase by scrypt.

Every embedding is sealed by itself with a nonce of its own, and bound to its place: moved to another recording it no
longer opens. Uses the library `cryptography`, which is imported only where a store is encrypted.
"""

import os
from pathlib import Path

from speakernet.files import FileError, open_regular, reading

STORE_KEY_VARIABLE = "SPEAKERNET_STORE_KEY"
LONGEST_SECRET = 4096  # bytes
SALT_BYTES, NONCE_BYTES = 16, 12
PROOF = b"speakernet people store"


class StoreKeyError(FileError):
    """A store whose key is missing, wrong, or not wanted."""


def read_secret(file: Path | None, variable: str) -> bytes | None:
    """The key or token in a file, without the line end; else that in an environment variable; None without either.

    Raises:
        FileError: not a regular file, empty, or too long.
    """
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


class Cipher:
    """Seals and opens bytes with one key.

    Args:
        key: the user's passphrase or key, of any length.
        salt: of the store.

    Raises:
        ValueError: an empty key, or `cryptography` is not installed.
    """

    def __init__(self, key: str | bytes, salt: bytes) -> None:
        if not key:
            raise StoreKeyError(
                "the key is empty; give a passphrase, or leave the key out for a store without encryption"
            )
        try:
            # Late: a store without a key needs no such library.
            from speakernet.inference import sealing
        except ImportError as error:
            raise StoreKeyError(
                "an encrypted store needs the library cryptography: pip install 'speakernet[encryption]'"
            ) from error
        secret = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
        self._sealer = sealing.sealer(secret, salt)
        self._refusal = sealing.InvalidTag

    def seal(self, content: bytes, place: bytes) -> bytes:
        """Encrypted bytes, which open at this place only."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + bytes(self._sealer.encrypt(nonce, content, place))

    def open(self, sealed: bytes, place: bytes) -> bytes:
        """The bytes that were sealed.

        Raises:
            StoreKeyError: another key, another place, or changed bytes.
        """
        try:
            return bytes(self._sealer.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place))
        except (self._refusal, ValueError) as error:
            raise StoreKeyError(
                "it does not open with this key: the key is another one, or the bytes were changed"
            ) from error
