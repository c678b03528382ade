"""Components from outside: rows that a user's file or an installed package adds to the tables.

Such a module defines `COMPONENTS`, from kind to name to `Component(options, "module:name")`. Only the command line
(`--plugin FILE`) and installed packages (entry points `speakernet.components`) import code; a configuration, a run
folder or a model file only names what it needs.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from speakernet.config.schema import CHOICES
from speakernet.data.augment.options import AUGMENTATIONS
from speakernet.frontend.options import FrontendOptions
from speakernet.losses.options import LOSSES, LossOptions, MetricOptions
from speakernet.models.options import PoolingOptions, TrunkOptions
from speakernet.options import OUTSIDE, Component, Options, lookup
from speakernet.training.options import OptimizerOptions
from speakernet.training.options.schedules import ScheduleOptions

TABLES: Mapping[str, Any] = {one.kind: one.table for one in CHOICES.values()} | {"augmentation": AUGMENTATIONS}
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
"""Kind -> what the options of such a component derive from."""


def add_file(path: str | Path) -> None:
    """Import a file and add its components to the tables; doing it twice adds nothing.

    Raises:
        ValueError: a file that does not import, or whose COMPONENTS are not as they must be.
    """
    file = Path(path).absolute()
    if not file.is_file() or file.suffix != ".py" or not file.stem.isidentifier():
        raise ValueError(f"--plugin {path}: expected a Python file whose name is an identifier, such as my_parts.py")
    # At the end of the path, so that it hides nothing; loader workers get the same path and find the file again.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(file.stem)
    if spec is None or Path(spec.origin or "").resolve() != file.resolve():
        raise ValueError(f"{path}: another module is called {file.stem}; rename the file")
    _add(file.stem, str(path))


def add_installed(entry_points: Iterable[EntryPoint]) -> None:
    """Add the components of installed packages."""
    for one in entry_points:
        _add(one.module, f"{one.name} = {one.value}")


def _add(module_name: str, where: str) -> None:
    if module_name in OUTSIDE:
        return
    try:
        module = importlib.import_module(module_name)
        found = _rows(module)
    except Exception as error:
        raise ValueError(f"{where}: {type(error).__name__}: {error}; --debug shows where") from error
    for table, name, component in found:
        table[name] = component
    source = Path(inspect.getfile(module)).read_bytes()
    OUTSIDE[module_name] = source, hashlib.sha256(source).hexdigest()


def _rows(module: ModuleType) -> list[tuple[dict[str, Component], str, Component]]:
    """The rows that a module adds, each with its table."""
    given = getattr(module, "COMPONENTS", None)
    if not isinstance(given, dict):
        raise ValueError(
            "it defines no COMPONENTS, such as {'pooling': {'Max': Component(MaxOptions, 'my_parts:Max')}}"
        )
    found = []
    for kind, rows in given.items():
        table = lookup(TABLES, kind, "kind of component")
        for name, component in rows.items():
            if not issubclass(component.options, BASES[kind]):
                raise ValueError(f"the options of {name} do not derive from {BASES[kind].__name__}")
            if name in table:
                raise ValueError(f"there is a {kind} {name} already; choose another name")
            component.load()
            found.append((table, name, component))
            if kind.endswith(" loss"):
                found.append((LOSSES, name, component))
    return found
