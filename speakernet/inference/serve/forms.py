"""The fields of a request: forms with recordings, parsed in memory, and what is wrong with them."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from speakernet.inference.serve.errors import ApiError
from speakernet.inference.serve.limits import Limits


class MemoryParser(MultiPartParser):
    """Keeps every part in memory: nobody's voice is to lie in a temporary file."""

    # Larger than any request that is let in.
    spool_max_size = 1 << 40


class Form:
    """A parsed request.

    Args:
        data: its fields.
    """

    def __init__(self, data: FormData) -> None:
        self.data = data

    @classmethod
    async def of(cls, request: Request, limits: Limits) -> "Form":
        """Parse a request.

        Raises:
            ApiError: no form, a broken one, or one with too many fields.
        """
        kind = request.headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            raise ApiError(
                415, "no_form", f"content type {kind or 'none'!r:.100}; expected multipart/form-data with a file"
            )

        async def content() -> AsyncGenerator[bytes, None]:
            yield await request.body()

        parser = MemoryParser(
            request.headers, content(), max_files=limits.clips, max_fields=limits.clips, max_part_size=4096
        )
        try:
            return cls(await parser.parse())
        except (MultiPartException, KeyError, ValueError, AssertionError) as error:
            reason = getattr(error, "message", str(error))
            raise ApiError(400, "broken_form", f"the form cannot be read ({reason:.200}); send it again") from error

    async def files(self, name: str, *, at_most: int = 1) -> list[tuple[str, bytes]]:
        """Name and content of the files of a field, at least one.

        Raises:
            ApiError: none, too many, or text in their place.
        """
        found = self.data.getlist(name)
        if not found or len(found) > at_most:
            wanted = "one file" if at_most == 1 else f"1 to {at_most} files"
            there = ", ".join(sorted({str(field)[:50] for field in self.data})) or "none"
            raise ApiError(
                422, "missing_field", f"{len(found)} fields {name!r}; expected {wanted} (fields of this form: {there})"
            )
        files = []
        for one in found:
            if not isinstance(one, UploadFile):
                raise ApiError(
                    422, "no_file", f"the field {name!r} holds text; expected a file, such as -F {name}=@a.wav"
                )
            files.append((_shown(one.filename or name), await one.read()))
        return files

    def text(self, name: str) -> str | None:
        """A field of text; None where it is missing or empty.

        Raises:
            ApiError: a file in its place.
        """
        value: Any = self.data.get(name)
        if isinstance(value, UploadFile):
            raise ApiError(422, "no_text", f"the field {name!r} holds a file; expected text")
        return (value.strip() or None) if value is not None else None

    def number(self, name: str) -> float | None:
        """A field that holds a number; None where it is missing.

        Raises:
            ApiError: something else.
        """
        value = self.text(name)
        if value is None:
            return None
        try:
            return float(value)
        except ValueError:
            raise ApiError(422, "no_number", f"{name} is {value!r:.50}; expected a number") from None


def _shown(name: str) -> str:
    """A file's name as it may stand in a message: without its folders, and not endless."""
    return "".join(
        letter if letter.isprintable() else "?" for letter in name.replace("\\", "/").rpartition("/")[2][:100]
    )
