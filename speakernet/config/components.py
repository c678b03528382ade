"""External components, which a user's file or an installed package adds to the tables.

Their module defines `COMPONENTS`: kind -> name -> `Component(options, "module:name")`. Code is
imported only for the command line (`--plugin FILE`) and for installed packages (entry points
`speakernet.components`); a configuration, run folder or model file only names the components it
needs.
"""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from speakernet.config.schema import CHOICES
from speakernet.data.augment.options import AUGMENTATIONS
from speakernet.frontend.options import FrontendOptions
from speakernet.losses.options import LOSSES, LossOptions, MetricOptions
from speakernet.models.options import PoolingOptions, TrunkOptions
from speakernet.options import PLUGIN_MODULES, Component, Options, lookup
from speakernet.training.options import OptimizerOptions
from speakernet.training.options.schedules import ScheduleOptions

# The tables are plain dictionaries, so an external component is a row like any other: listed,
# described in the help and checked in the same way. No configuration and no model file can name a
# file to import, because reading one must not run code.
TABLES: Mapping[str, Any] = {choice.kind: choice.table for choice in CHOICES.values()} | {
    "augmentation": AUGMENTATIONS
}
BASES: Mapping[str, type[Options]] = {
    "model": TrunkOptions,
    "pooling": PoolingOptions,
    "front end": FrontendOptions,
    "loss": LossOptions,
    "classification loss": LossOptions,
    "metric loss": MetricOptions,
    "optimizer": OptimizerOptions,
    "schedule": ScheduleOptions,
    "augmentation": Options,
}
"""Kind -> base class of the component's options."""


def add_file(path: str | Path) -> None:
    """Import a file and add its components to the tables; adding a file twice has no effect.

    Raises:
        ValueError: the file cannot be imported, or its COMPONENTS are malformed.
    """
    file = Path(path).absolute()
    if not file.is_file() or file.suffix != ".py" or not file.stem.isidentifier():
        raise ValueError(
            f"--plugin {path}: the name must be letters, digits and underscores, ending in .py"
            if file.is_file()
            else f"--plugin {path}: there is no such file"
        )
    # At the end of sys.path, so that the folder shadows nothing; loader workers inherit the path
    # and find the file too.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # The file may be newer than Python's list of the folder, as in a notebook.
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(file.stem)
    if spec is None or Path(spec.origin or "").resolve() != file.resolve():
        raise ValueError(f"{path}: another module is named {file.stem}; rename the file")
    _add(file.stem, str(path))


def add_installed(entry_points: Iterable[EntryPoint]) -> None:
    """Add the components of installed packages."""
    for entry_point in entry_points:
        _add(entry_point.module, f"{entry_point.name} = {entry_point.value}")


def _add(module_name: str, where: str) -> None:
    if module_name in PLUGIN_MODULES:
        return
    # This runs foreign code, which may raise anything. Before any option is read, it becomes one
    # line that names the file.
    try:
        module = importlib.import_module(module_name)
        rows = list(_rows(module))
    except Exception as error:
        raise ValueError(
            f"{where}: {type(error).__name__}: {error}; --debug shows the traceback"
        ) from error
    # Only when all rows are sound, or half a plug-in would fail later under another name.
    for table, name, component in rows:
        table[name] = component
    # Kept with its checksum, because a model file made with this code can only be read with it; the
    # run folder gets a copy.
    source = Path(inspect.getfile(module)).read_bytes()
    PLUGIN_MODULES[module_name] = source, hashlib.sha256(source).hexdigest()


def _rows(module: ModuleType) -> Iterator[tuple[dict[str, Component], str, Component]]:
    """The components of a module, each with its table and name."""
    kinds = getattr(module, "COMPONENTS", None)
    if not isinstance(kinds, dict):
        raise ValueError(
            "found no dictionary COMPONENTS; expected one such as "
            "COMPONENTS = {'pooling': {'Max': Component(MaxOptions, 'my_parts:Max')}}"
        )
    for kind, rows in kinds.items():
        table = lookup(TABLES, kind, "kind of component")
        for name, component in rows.items():
            if not issubclass(component.options, BASES[kind]):
                raise ValueError(f"the options of {name} do not derive from {BASES[kind].__name__}")
            if name in table:
                raise ValueError(f"the {kind} {name} already exists; choose another name")
            # Imported now, although it is built later, so that a mistyped path in the table is
            # found before the first step.
            component.load()
            yield table, name, component
            if kind.endswith(" loss"):
                yield LOSSES, name, component
