"""What an option is: one field of a dataclass, with its type, its bounds, its default and the docstring below it.

Every room that has options writes them once, in a module of its own that imports no torch. This file reads such
dataclasses: it checks a value against its field, says in words what a field takes, and finds the docstrings. It knows
no option and no configuration file.
"""

import ast
import copy
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

# Every number has an upper bound too. What no machine can hold is a typing mistake, and the message should say so at
# once: without a bound, 10^12 utterances in a batch end in an allocation error minutes later.
Switch = Literal["auto", "on", "off"]
Share = Annotated[float, Ge(0.0), Le(1.0)]
"""0 to 1."""
Probability = Annotated[float, Ge(1e-6), Le(1 - 1e-6)]
"""Between 0 and 1, neither of them."""
Decay = Annotated[float, Ge(0.0), Le(0.9999999)]
"""The share of an old value that a running mean keeps."""
Count = Annotated[int, Ge(1), Le(10**9)]
CountOrZero = Annotated[int, Ge(0), Le(10**9)]
Frames = Annotated[int, Ge(1), Le(360_000)]
"""Frames of 10 ms: an hour at most."""
FramesOrZero = Annotated[int, Ge(0), Le(360_000)]
Processes = Annotated[int, Ge(0), Le(1024)]
"""Processes or threads of one machine."""
Epochs = Annotated[float, Ge(0.0), Le(1e6)]
Positive = Annotated[float, Gt(0.0), Le(1e9)]
NotNegative = Annotated[float, Ge(0.0), Le(1e9)]
Decibels = Annotated[float, Ge(-200.0), Le(200.0)]
DEFAULT_SEED = 10
"""Of everything that is drawn where nobody says otherwise, so that a list has one interval whoever measures it."""
SAMPLE_RATE = 16_000
"""Samples a second where nobody says otherwise: what speech corpora and published models have."""
Gigabytes = Annotated[float, Ge(0.0), Le(1e6)]
INPUT_MARK = "an input file or folder"
InputPath = Annotated[str, INPUT_MARK]
"""A file or folder that is read: named from the working directory or from the configuration file, kept absolute."""

_MADE = "_is_made_by_with_defaults"
_LAX = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)


@dataclasses.dataclass(kw_only=True)
class Options:
    """The base of every options dataclass.

    Raises:
        OptionError: a value that its field does not take, whoever gives it: a configuration, a model file, a notebook.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            try:
                setattr(self, field.name, checked(type(self), field.name, getattr(self, field.name)))
            except OptionError as error:
                raise OptionError(f"{type(self).__name__}: {field.name} {error}") from None

    def problems(self) -> Iterator[tuple[str, str]]:
        """What no single field can tell: values that contradict each other, as (field, found and expected)."""
        yield from ()


@dataclasses.dataclass(kw_only=True)
class NamedOptions(Options):
    """The base of sections that choose a part: `name` is the part's row in its table."""

    name: str = ""


class OptionError(ValueError):
    """A value that its field does not take; the message says what was found and what is expected."""


def checked(owner: type, name: str, value: Any) -> Any:
    """`value` as the field's type; text such as "3" or "true" is read as a number or a switch where one is wanted.

    Raises:
        OptionError: not of that type, or out of bounds.
    """
    declared = annotations(owner)[name]
    if isinstance(declared, type) and issubclass(declared, Options):
        # Options of a part within those of another; they checked themselves when they were made.
        if isinstance(value, declared):
            return value
        raise OptionError(f"is {value!r}; expected {declared.__name__}")
    is_refused = (isinstance(value, bool) and not _takes(declared, bool)) or (
        # YAML reads 08 and 1_000 as it likes; a number where text is wanted is a name or a path that looks like one.
        value is None and not _takes(declared, type(None))
    )
    if not is_refused:
        try:
            return _adapter(owner, name).validate_python(value)
        except ValidationError:
            pass
    found = "nothing" if value is None else repr(value)
    raise OptionError(f"is {found}; expected {in_words(declared)}{_bracketed(owner, name, value)}")


def _bracketed(owner: type, name: str, value: Any) -> str:
    """What to write where a list's only member was given without its brackets."""
    if value is None or isinstance(value, list):
        return ""
    try:
        _adapter(owner, name).validate_python([value])
    except ValidationError:
        return ""
    return f": write [{value}]"


def annotations(owner: type) -> dict[str, Any]:
    """The declared type of every field, bounds included."""
    return _annotations(owner)  # type: ignore[arg-type]  # a class is hashable, whatever its objects are


@functools.cache
def _annotations(owner: type) -> dict[str, Any]:
    hints = typing.get_type_hints(owner, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner)}


def field_names(owner: type) -> list[str]:
    """The options of a class, those that it shares with others first."""
    return [field.name for field in dataclasses.fields(owner)]


def default_of(owner: type, name: str) -> Any:
    """The value of an option that nobody gave."""
    field = next(one for one in dataclasses.fields(owner) if one.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def with_defaults(owner: type, name: str, defaults: Mapping[str, Any] | None = None, **facts: Any) -> type:
    """A subclass called `name` with the same options and other defaults, as sizes of one family have.

    Args:
        owner: the options class of the family.
        name: of the class.
        defaults: option to default, where it differs.
        facts: class attributes that differ.
    """
    declared = annotations(owner)
    fields: list[Any] = []
    for option, value in (defaults or {}).items():
        # A list as default would be one list for all objects.
        make = functools.partial(copy.deepcopy, value) if isinstance(value, list) else None
        default = dataclasses.field(default_factory=make) if make else dataclasses.field(default=value)
        fields.append((option, declared[option], default))
    namespace = {"__doc__": owner.__doc__, "__module__": owner.__module__, _MADE: True, **facts}
    return dataclasses.make_dataclass(name, fields, bases=(owner,), namespace=namespace, kw_only=True)


def documentation(owner: type) -> dict[str, str]:
    """The docstring below each field, in one line; fields of base classes included."""
    return _documentation(owner)  # type: ignore[arg-type]  # a class is hashable, whatever its objects are


@functools.cache
def _documentation(owner: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        # What `with_defaults` made has no source of its own, and nothing to say that its family does not.
        if dataclasses.is_dataclass(base) and _MADE not in vars(base):
            found |= _docstrings_of(base)
    return found


def summary(owner: type) -> str:
    """The first line of a class's docstring: what the part is."""
    return (inspect.getdoc(owner) or "").split("\n", 1)[0]


def in_words(declared: Any) -> str:
    """A field's type and bounds for people.

    >>> in_words(Annotated[int, Ge(1), Le(9)] | Literal["auto"])
    'int from 1 to 9 or auto'
    """
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin is Annotated:
        return in_words(arguments[0]) + _bounds_in_words(arguments[1:])
    if origin is Literal:
        return " or ".join(str(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(one) for one in arguments)
    if origin is list:
        return f"a list of {in_words(arguments[0])}"
    if declared is type(None):
        return "nothing"
    if declared is bool:
        return "true or false"
    if declared is str:
        return "text"
    return declared.__name__ if isinstance(declared, type) else str(declared)


def is_input(owner: type, name: str) -> bool:
    """Whether an option names a file or folder that is read."""
    return INPUT_MARK in typing.get_args(annotations(owner)[name])


def words_of(declared: Any) -> tuple[Any, ...]:
    """The words that a field takes besides numbers, such as `auto`."""
    if typing.get_origin(declared) is Literal:
        return typing.get_args(declared)
    return tuple(word for one in typing.get_args(declared) for word in words_of(one))


def _takes(declared: Any, kind: type) -> bool:
    if declared is kind:
        return True
    if typing.get_origin(declared) is Literal:
        return any(type(choice) is kind for choice in typing.get_args(declared))
    if typing.get_origin(declared) is list:
        return False
    return any(_takes(one, kind) for one in typing.get_args(declared))


@functools.cache
def _adapter(owner: Any, name: str) -> TypeAdapter:
    return TypeAdapter(annotations(owner)[name], config=_LAX)


def _bounds_in_words(bounds: Sequence[Any]) -> str:
    low: Any = next((one for one in bounds if isinstance(one, Ge | Gt)), None)
    high: Any = next((one for one in bounds if isinstance(one, Le | Lt)), None)
    if low is None and high is None:
        return ""
    if low is not None and high is not None and isinstance(low, Ge):
        return f" from {_number(low.ge)} to {_number(high.le if isinstance(high, Le) else high.lt)}"
    if isinstance(low, Gt):
        above = f" above {_number(low.gt)}"
        return above if high is None else f"{above}, {_number(high.le if isinstance(high, Le) else high.lt)} at most"
    if low is not None:
        return f" of {_number(low.ge)} or more"
    return f" of {_number(high.le if isinstance(high, Le) else high.lt)} at most"


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def _docstrings_of(owner: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return found


def pair_problems(options: Any, *fields: str) -> Iterator[tuple[str, str]]:
    """Fields that hold a lowest and a highest value, and do not."""
    for name in fields:
        value = getattr(options, name)
        if len(value) != 2 or not all(map(math.isfinite, value)) or value[0] > value[1]:
            yield name, f"{value}; expected two numbers, the lower first"
