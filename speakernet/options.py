"""The base of options, and tables of components by name, without importing torch.

A package declares its options once, as fields of a pydantic model in a separate module: type,
bounds, default, and a docstring below each field. A table is a plain dictionary from name to
`Component`; a component's module is imported only when the component is built.
"""

import ast
import copyreg
import difflib
import functools
import inspect
import itertools
import pkgutil
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    WrapSerializer,
    field_validator,
)

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
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "nothing",
}

Row = TypeVar("Row")
T = TypeVar("T")
Key = TypeVar("Key")

Several = Annotated[
    Sequence[T], AfterValidator(tuple), WrapSerializer(lambda values, dump: list(dump(values)))
]
"""A list in a configuration: a tuple, because a checked configuration never changes, and a list
again when it is dumped."""


def freeze(values: Mapping[Any, Any]) -> types.MappingProxyType[Any, Any]:
    """A copy that never changes."""
    return types.MappingProxyType(dict(values))


ByName = Annotated[
    dict[Key, T],
    AfterValidator(freeze),
    WrapSerializer(lambda values, dump: dump(dict(values))),
]
"""A mapping in a configuration, which does not change either."""
# Loader workers that are spawned get the options pickled, and Python cannot pickle such a mapping.
copyreg.pickle(types.MappingProxyType, lambda values: (freeze, (dict(values),)))


# pydantic instead of plain dataclasses because it checks bounds: without them a mistyped number
# fails minutes later, in an allocation far from the line that has it.
class Options(BaseModel):
    """The base of all options. A value that its field does not accept raises `OptionError`."""

    model_config = ConfigDict(
        extra="forbid",
        # A checked configuration never changes; `model_copy(update=…)` makes another one.
        frozen=True,
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
        # Of the words that YAML 1.1 reads as booleans, only these are values of our options.
        for word in ("on", "yes") if value else ("off", "no"):
            if word in choices:
                return word
        raise ValueError("neither true nor false")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        """Add the descriptions, which pydantic would otherwise read when the class is defined."""
        schema = handler(core_schema)
        described = handler.resolve_ref_schema(schema)
        # Where the source breaks its lines means nothing.
        described["description"] = " ".join(described.get("description", "").split())
        for name, declared in described.get("properties", {}).items():
            if text := description_of(cls, name):
                declared["description"] = text
        return schema

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield values that contradict each other, as (field, what was found and expected)."""
        yield from ()


class OptionError(ValueError):
    """A value that its field does not accept, or a field that does not exist."""

    def __init__(
        self, owner: type[Options], values: Mapping[str, Any], error: ValidationError
    ) -> None:
        # Only the first mistake is reported, because others often follow from it.
        first = error.errors()[0]
        place = first["loc"]
        self.field = str(place[0]) if place else ""
        """Empty if the class checks several fields together."""
        self.found = self._describe(owner, values, first)
        super().__init__(f"{owner.__name__}: {self.field} {self.found}")

    def _describe(self, owner: type[Options], values: Mapping[str, Any], error: Any) -> str:
        """What was found and what is expected, after the name of the field."""
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, OptionError):
            # An entry of a list or dictionary has options of its own.
            entry = error["loc"][1]
            place = f"entry {entry + 1}" if isinstance(entry, int) else entry
            return f"is wrong in {place}: {cause.field} {cause.found}"
        if error["type"] == "extra_forbidden":
            return f"does not exist; {suggestion(self.field, owner.model_fields)}"
        if self.field not in owner.model_fields:
            return str(cause)
        value = values.get(self.field)
        shown = repr(value)[:100]
        if self.field not in values:
            shown = "missing"
        elif value is None:
            shown = "empty"
        elif value is True:
            # On the command line, an option without a value is true.
            shown = "without a value (or true)"
        declared = owner.model_fields[self.field].rebuild_annotation()
        return f"is {shown}; expected {in_words(declared)}"


@dataclass(frozen=True)
class Choice(Generic[T]):
    """What `auto` resolved to on this machine, and why."""

    value: T
    reason: str

    def __str__(self) -> str:
        value: Any = self.value
        if isinstance(value, bool):
            value = "yes" if value else "no"
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


PLUGIN_MODULES: dict[str, tuple[bytes, str]] = {}
"""Name of each plug-in's module, which added components to the tables -> its source, and the
SHA-256 of that."""


def plugin_digests(components: Iterable[Component]) -> dict[str, str]:
    """The plug-in modules that these components are from, each with its SHA-256."""
    modules = {component.path.partition(":")[0] for component in components}
    return {name: digest for name, (_, digest) in PLUGIN_MODULES.items() if name in modules}


def create(component: Component, options: Any, **context: Any) -> Any:
    """Build a component from its options and the parts of `context` that its signature asks for."""
    target = component.load()
    # Components name what they need as parameters, so a new part of the context changes no
    # component, and none has to accept what it does not use.
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
    table: Mapping[str, Component], name: str, values: Mapping[str, Any], kind: str = "entry"
) -> Any:
    """The options of the component `name` with these values, and otherwise defaults."""
    return lookup(table, name, kind).options(**values)


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
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return "known: " + ", ".join(known)


def default_of(owner: type[Options], name: str) -> Any:
    """The default of an option."""
    return owner.model_fields[name].get_default(call_default_factory=True)


def description_of(owner: type[Options], name: str) -> str:
    """The docstring below a field in one line, or that of the base-class field it overrides."""
    for base in owner.__mro__:
        if text := _docstrings(base.__module__).get((base.__name__, name)):
            return text
    return ""


# Reading them takes as long as everything else in defining the options, and only help, schema and
# documentation show them.
@functools.cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the docstring below the field in a module's source, in one line."""
    texts = {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        # Built in, or typed into an interpreter.
        return {}
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for field, below in itertools.pairwise(owner.body):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
                texts[owner.name, ast.unparse(field.target)] = " ".join(str(text.value).split())
    return texts


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
    if origin is Annotated:
        return alternatives(arguments[0])
    if origin is Literal:
        return list(arguments)
    if origin not in (typing.Union, types.UnionType):
        return [declared]
    accepted = []
    for argument in arguments:
        accepted += alternatives(argument)
    return accepted


def in_words(declared: Any) -> str:
    """A field's type and bounds in words.

    >>> in_words(Annotated[int, Ge(1), Le(9)] | Literal["auto"])
    'a whole number from 1 to 9 or auto'
    """
    origin = typing.get_origin(declared)
    arguments = typing.get_args(declared)
    if isinstance(declared, str):
        return declared
    if origin is Annotated:
        return in_words(arguments[0]) + _bounds_in_words(arguments[1:])
    if origin in (list, Sequence):
        return f"a list in brackets, each entry {in_words(arguments[0])}"
    if isinstance(declared, type) and issubclass(declared, Options):
        return f"{{{', '.join(declared.model_fields)}}}"
    if origin is dict:
        if arguments[1] is Any:
            return "`option: value` pairs"
        each = in_words(arguments[1])
        # Annotated with a function that makes options of a path alone.
        if any(isinstance(mark, BeforeValidator) for mark in typing.get_args(arguments[1])):
            each = f"a path or with {each}"
        return f"names (letters, digits, _ + -) in braces, each with {each}"
    if origin in (typing.Union, types.UnionType):
        # The words of a Literal are alternatives like the others.
        flat: list[Any] = []
        for argument in arguments:
            is_words = typing.get_origin(argument) is Literal
            flat += typing.get_args(argument) if is_words else [argument]
        return _join_alternatives(map(in_words, flat))
    if origin is Literal:
        return _join_alternatives(map(in_words, arguments))
    return TYPE_NAMES.get(declared) or declared.__name__


def _bounds_in_words(marks: Iterable[Any]) -> str:
    """Lower and upper bound; every number that has one has both."""
    bounds: dict[type, Any] = {type(mark): mark for mark in marks}
    if Le not in bounds:
        return ""
    high = _number(bounds[Le].le)
    if Ge in bounds:
        return f" from {_number(bounds[Ge].ge)} to {high}"
    return f" above {_number(bounds[Gt].gt)}, at most {high}" if Gt in bounds else ""


def _number(value: Any) -> str:
    return f"{value:,.10g}" if isinstance(value, float) else f"{value:,}"


def _join_alternatives(texts: Iterable[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} or {last}" if first else last
