"""What a server answers when it does not do what it was asked."""

import json
from collections.abc import Mapping


class ApiError(Exception):
    """A refusal: status, a word for programs, and a sentence for people."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """As JSON.

        >>> ApiError(404, "unknown_person", "no such person").body()
        b'{"error": {"code": "unknown_person", "message": "no such person"}}'
        """
        return json.dumps({"error": {"code": self.code, "message": self.message}}).encode()
