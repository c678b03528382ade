"""The cipher of an encrypted store: AES-GCM under a key derived by scrypt. Nothing else uses `cryptography`."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

__all__ = ["InvalidTag", "sealer"]

KEY_BYTES = 32
SCRYPT_COST = 1 << 15
"""OWASP's advice for scrypt with blocks of 8: 32 MiB and about a tenth of a second."""


def sealer(secret: bytes, salt: bytes) -> AESGCM:
    """What seals and opens with the key that this passphrase and salt give."""
    return AESGCM(Scrypt(salt=salt, length=KEY_BYTES, n=SCRYPT_COST, r=8, p=1).derive(secret))
