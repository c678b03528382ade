"""What `--help` says of the options: the few that people use, one section, or all of them with the old names."""

from collections.abc import Iterator
from textwrap import fill

from speakernet.config.aliases import ALIASES
from speakernet.config.loading import CLASSIC, OURS
from speakernet.config.schema import NESTED, PARTS, SECTIONS, TABLES, names_in, owner_of, takers
from speakernet.options import annotations, default_of, documentation, field_names, words_of

EVERYDAY = {
    "what to train on": [
        "data.train_list", "data.test_list", "data.validation_list", "data.train_path", "data.test_path",
        "augment.noise_path", "augment.rir_path",
    ],
    "what to train": ["model.name", "model.embedding_dim", "frontend.num_mels", "loss.name", "loss.margin"],
    "how to train": [
        "training.max_epochs", "data.batch_size", "data.crop_frames", "optimizer.learning_rate", "augment.enabled",
        "augment.speed_factors", "training.test_interval", "training.patience",
    ],
    "where and from where": ["training.save_path", "training.initial_model"],
    "the machine": ["runtime.device", "runtime.precision", "data.num_workers", "runtime.seed"],
}  # fmt: skip
"""The options that most users ever set, as a short `--help` shows them."""
WIDTH = 100


def help_text(topic: str = "") -> str:
    """The options as text.

    Args:
        topic: a section, "all", or empty for the everyday ones.

    Raises:
        ValueError: no such section.
    """
    if not topic:
        lines = ["Options people use (YAML: section, then key; command line: --section.key VALUE):"]
        for title, keys in EVERYDAY.items():
            lines += ["", f"  {title}:"]
            for key in keys:
                section, _, field = key.partition(".")
                lines += _option(section, field)
        return "\n".join([*lines, "", f"All options: --help all, or one section: --help {'|'.join(SECTIONS)}"])
    if topic != "all" and topic not in SECTIONS:
        raise ValueError(f"--help {topic}: expected all or one of {', '.join(SECTIONS)}")
    lines = []
    for section in SECTIONS if topic == "all" else [topic]:
        lines += _section(section)
    if topic == "all":
        lines += [
            f"--defaults {OURS}|{CLASSIC}: where omitted options start from; without it a flat YAML means {CLASSIC}'s,",
            "and so does its checkpoint that is scored (--eval --initial_model FILE) without --config; else ours.",
            "",
        ]
        lines.append("Other names that are understood, in flat YAML files and on the command line:")
        lines += [
            f"  --{name:<32} {alias.describes}"
            for name, alias in sorted(ALIASES.items(), key=lambda one: one[0].casefold())
        ]
    return "\n".join(lines)


def _section(section: str) -> Iterator[str]:
    """What every choice has, then what each part of the section's table takes besides."""
    yield f"{section}: {(SECTIONS[section].__doc__ or '').splitlines()[0]}"
    common = field_names(SECTIONS[section])
    for field in common:
        yield from _option(section, field)
    for name, part in TABLES.get(section, ("", {}))[1].items():
        own = [field for field in field_names(part.options) if field not in common]
        if own:
            yield f"  with {section}.name: {name}"
            for field in own:
                yield from _option(section, field, part.options)
    yield ""


def _option(section: str, field: str, owner: type | None = None) -> Iterator[str]:
    names = names_in({})
    owner = owner or owner_of(section, names)
    if field not in field_names(owner):
        # Not of the part that is the default: any that takes it can explain it.
        owner = TABLES[section][1][takers(section, field)[0]].options
    default = default_of(owner, field)
    shown = "empty" if default in ("", None, []) else str(default).lower() if isinstance(default, bool) else default
    if place := NESTED.get(f"{section}.{field}"):
        shown = getattr(default, "name", "") or f"those of the {PARTS[place][0]}"
    words = words_of(annotations(owner)[field])
    choices = f"{'|'.join(map(str, words))}; " if words else ""
    yield f"  --{section}.{field} ({choices}default {shown})"
    yield fill(documentation(owner)[field], WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
