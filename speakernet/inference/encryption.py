"""Encryption of embeddings in a store of people: AES-GCM, with a key derived by scrypt."""

import functools
import os
from pathlib import Path
from typing import Any

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
except ImportError:  # Only encrypted stores need it.
    AESGCM = None  # type: ignore[assignment,misc]

from speakernet.files import FileError

SALT_BYTES = 16
NONCE_BYTES = 12
KEY_BYTES = 32
PROOF = b"speakernet people store"
SCRYPT_COST = 1 << 15
"""Recommended by OWASP for scrypt with r = 8: 32 MiB and about a tenth of a second."""


class StoreKeyError(FileError):
    """The key of a store is missing, wrong or superfluous."""


@functools.lru_cache(maxsize=4)
def derive_cipher(key: str | bytes, salt: bytes) -> Any:
    """AES-GCM with a key derived by scrypt from the passphrase and the store's salt."""
    if not key:
        raise StoreKeyError(
            "the key is empty; give a passphrase, or no key for an unencrypted store"
        )
    if AESGCM is None:
        raise StoreKeyError(
            "encryption needs an additional package: pip install 'speakernet[encryption]'"
        )
    secret = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
    return AESGCM(Scrypt(salt=salt, length=KEY_BYTES, n=SCRYPT_COST, r=8, p=1).derive(secret))


def seal(aead: Any, content: bytes, place: bytes) -> bytes:
    """Encrypt with a new nonce, bound to `place`: bytes that are moved to a different row cannot be
    decrypted.
    """
    nonce = os.urandom(NONCE_BYTES)
    return nonce + bytes(aead.encrypt(nonce, content, place))


def unseal(path: Path, aead: Any, sealed: bytes, place: bytes) -> bytes:
    try:
        return bytes(aead.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place))
    except (InvalidTag, ValueError) as error:
        raise StoreKeyError(
            f"{path}: decryption failed; the key is wrong, or the store was tampered with"
        ) from error
