"""The base of options, and tables of components by name, without importing torch.

A package declares its options once, as fields of a pydantic model in a separate module: type,
bounds, default, and a docstring below each field. A table is a plain dictionary from name to
`Component`; a component's module is imported only when the component is built.
"""

import difflib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

# Every number also has an upper bound, so that a typing mistake does not become an allocation error
# later.
Switch = Literal["auto", "on", "off"]
Share = Annotated[float, Ge(0.0), Le(1.0)]
Probability = Annotated[float, Ge(1e-6), Le(1 - 1e-6)]
Decay = Annotated[float, Ge(0.0), Le(0.9999999)]  # share of the old value in a running mean
Count = Annotated[int, Ge(1), Le(10**9)]
CountOrZero = Annotated[int, Ge(0), Le(10**9)]
Frames = Annotated[int, Ge(1), Le(360_000)]  # of 10 ms, at most an hour
FramesOrZero = Annotated[int, Ge(0), Le(360_000)]
Processes = Annotated[int, Ge(0), Le(1024)]  # processes or threads of one machine
Epochs = Annotated[float, Ge(0.0), Le(1e6)]
Positive = Annotated[float, Gt(0.0), Le(1e9)]
NotNegative = Annotated[float, Ge(0.0), Le(1e9)]
Decibels = Annotated[float, Ge(-200.0), Le(200.0)]
Gigabytes = Annotated[float, Ge(0.0), Le(1e6)]
INPUT_MARK = "an input file or folder"
InputPath = Annotated[str, MaxLen(4096), INPUT_MARK]
"""An input file or folder: relative to the working directory or to the configuration file, saved as
absolute."""
DEFAULT_SEED = 10
SAMPLE_RATE = 16_000
LOWEST_SAMPLE_RATE, HIGHEST_SAMPLE_RATE = 1_000, 768_000  # Hz, of a corpus
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "nothing",
}

Row = TypeVar("Row")
T = TypeVar("T")


class Options(BaseModel):
    """The base of all options. A value that its field does not accept raises `OptionError`."""

    model_config = ConfigDict(
        extra="forbid",
        # A checked configuration never changes; `model_copy(update=…)` makes another one.
        frozen=True,
        use_attribute_docstrings=True,
        # Only the chosen components need a validator.
        defer_build=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise OptionError(type(self), values, error) from None

    @field_validator("*", mode="before")
    @classmethod
    def _restore_switch_word(cls, value: Any, info: ValidationInfo) -> Any:
        """Restore the word that was written: YAML reads an unquoted `off` as False, which not every
        field accepts.
        """
        choices = alternatives(cls.model_fields[str(info.field_name)].annotation)
        if not isinstance(value, bool) or bool in choices:
            return value
        meant = [word for word in (("on", "yes") if value else ("off", "no")) if word in choices]
        if not meant:
            raise ValueError("neither true nor false")
        return meant[0]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield values that contradict each other, as (field, what was found and expected)."""
        yield from ()


class OptionError(ValueError):
    """A value that its field does not accept, or a field that does not exist."""

    def __init__(
        self, owner: type[Options], values: Mapping[str, Any], error: ValidationError
    ) -> None:
        first = error.errors()[0]
        self.field = str(*first["loc"][:1])
        field = owner.model_fields.get(self.field)
        self.found: str
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, OptionError):
            at = first["loc"][1]
            self.found = (
                f"is wrong in {f'entry {at + 1}' if isinstance(at, int) else at}: "
                f"{inner.field} {inner.found}"
            )
        elif first["type"] == "extra_forbidden":
            self.found = f"does not exist; {suggestion(self.field, owner.model_fields)}"
        elif field is None:
            self.found = str(first["ctx"]["error"])
        else:
            value = values.get(self.field)
            found = (
                "missing"
                if self.field not in values
                else "empty"
                if value is None
                else repr(value)[:100]
            )
            # On the command line, an option without a value is true.
            found = "without a value (or true)" if value is True else found
            self.found = f"is {found}; expected {in_words(field.rebuild_annotation())}"
        super().__init__(f"{owner.__name__}: {self.field} {self.found}")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """What `auto` resolved to on this machine, and why."""

    value: T
    reason: str

    def __str__(self) -> str:
        value = (
            {True: "yes", False: "no"}[self.value] if isinstance(self.value, bool) else self.value
        )
        return f"{value} ({self.reason})"


class Component(NamedTuple):
    """A row of a table: the component's options, and its import path as `package.module:name`."""

    options: type[Any]
    path: str
    what: str = ""
    """A description, if the component shares its options with others."""

    @property
    def summary(self) -> str:
        """A one-line description of the component."""
        return self.what or summary(self.options)

    def load(self) -> Any:
        """The class or function itself."""
        return pkgutil.resolve_name(self.path)


OUTSIDE: dict[str, tuple[bytes, str]] = {}
"""External module that added components to the tables -> its source and the SHA-256 of it."""


def needs_outside(components: Iterable[Component]) -> dict[str, str]:
    """The external modules of these components, each with its SHA-256."""
    modules = {one.path.partition(":")[0] for one in components}
    return {name: digest for name, (_, digest) in OUTSIDE.items() if name in modules}


def create(component: Component, options: Any, **context: Any) -> Any:
    """Build a component from its options and the parts of `context` that its signature asks for."""
    target = component.load()
    offered = {"options": options, **context}
    return target(
        **{name: offered[name] for name in inspect.signature(target).parameters if name in offered}
    )


def lookup(table: Mapping[str, Row], name: str, kind: str = "entry") -> Row:
    """The table's row with that name; an unknown name raises ValueError with suggestions."""
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, table)}")
    return table[name]


def options_of(
    table: Mapping[str, Component], name: str, given: Mapping[str, Any], kind: str = "entry"
) -> Any:
    """The options of the component `name`, with the given values and otherwise defaults."""
    return lookup(table, name, kind).options(**given)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most similar to `name`, best first, ignoring case."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    # Papers write CAM++ where code writes CAMPPlus.
    matches = difflib.get_close_matches(name.casefold().replace("+", "p"), by_folded, n=count)
    return [by_folded[match] for match in matches]


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the most similar names, or all names if none is similar."""
    known = sorted(known)
    near = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "known: " + ", ".join(known)


def default_of(owner: type[Options], name: str) -> Any:
    """The default of an option."""
    return owner.model_fields[name].get_default(call_default_factory=True)


def description_of(owner: type[Options], name: str) -> str:
    """The docstring below a field in one line, or that of the base-class field it overrides."""
    fields = (getattr(base, "model_fields", {}).get(name) for base in owner.__mro__)
    return " ".join(
        next((one.description for one in fields if one and one.description), "").split()
    )


def summary(owner: type) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(owner) or "").split("\n", 1)[0]


def is_input(owner: type[Options], name: str) -> bool:
    """Whether an option names an input file or folder."""
    return INPUT_MARK in owner.model_fields[name].metadata


def alternatives(declared: Any) -> list[Any]:
    """The types and words that a field accepts, one by one."""
    origin = typing.get_origin(declared)
    arguments = typing.get_args(declared)
    if origin in (Annotated, typing.Union, types.UnionType):
        inner = arguments[:1] if origin is Annotated else arguments
        return [one for argument in inner for one in alternatives(argument)]
    return list(arguments) if origin is Literal else [declared]


def in_words(declared: Any) -> str:
    """A field's type and bounds in words.

    >>> in_words(Annotated[int, Ge(1), Le(9)] | Literal["auto"])
    'a whole number from 1 to 9 or auto'
    """
    origin = typing.get_origin(declared)
    arguments = typing.get_args(declared)
    if origin is Annotated:
        bounds = {
            kind: getattr(one, kind)
            for one in arguments[1:]
            for kind in ("ge", "gt", "le")
            if hasattr(one, kind)
        }
        if not bounds:
            return in_words(arguments[0])
        low, high = (
            f"{one:,.10g}" if isinstance(one, float) else f"{one:,}" for one in bounds.values()
        )
        between = f"above {low}, at most {high}" if "gt" in bounds else f"from {low} to {high}"
        return f"{in_words(arguments[0])} {between}"
    if origin is list:
        return f"a list in brackets, each entry {in_words(arguments[0])}"
    if isinstance(declared, type) and issubclass(declared, Options):
        return f"{{{', '.join(declared.model_fields)}}}"
    if origin is dict:
        if arguments[1] is Any:
            return "`option: value` pairs"
        # If a function converts the value to options, a path alone is accepted too.
        is_short = typing.get_origin(arguments[1]) is Annotated
        each = in_words(typing.get_args(arguments[1])[0] if is_short else arguments[1])
        return (
            "names (letters, digits, _ + -) in braces, each with "
            f"{'a path or with ' if is_short else ''}{each}"
        )
    if origin in (typing.Union, types.UnionType, Literal):
        *first, last = (
            one if isinstance(one, str) else in_words(one)
            for some in arguments
            for one in (typing.get_args(some) if typing.get_origin(some) is Literal else [some])
        )
        return f"{', '.join(first)} or {last}" if first else last
    return TYPES.get(declared) or declared.__name__
