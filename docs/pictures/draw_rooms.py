"""Draw the rooms of the package and who imports whom, from the code: `python docs/pictures/draw_rooms.py`.

The picture lies beside this script, and a test fails when it is stale. Its places are chosen by hand, its arrows are
the imports that there are. What a room imports of the floor is left out, since all do, and so is what arrows over
another room show.
"""

import ast
import functools
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "speakernet"
PICTURE = Path(__file__).with_name("rooms.svg")

ROOMS = {
    "cli": (0, 0, 4, "commands"),
    "assembly": (0, 1, 3, "from the configuration to running parts"),
    "config": (3, 1, 1, "sections, files, old names"),
    "inference": (0, 2, 2, "a model file in use"),
    "checks": (2, 2, 1, "before the work"),
    "corpora": (3, 2, 1, "making corpora"),
    "models": (0, 3, 1, "features to embedding"),
    "evaluation": (1, 3, 1, "scores, figures, report"),
    "frontend": (0, 4, 1, "waveform to features"),
    "data": (1, 4, 3, "lists, audio, augmentation, batches"),
    "training": (0, 5, 2, "step, schedules, resuming"),
    "losses": (2, 5, 2, "what embeddings are taught by"),
}
"""Room -> column, row, columns wide, what it is for."""
IN_WORDS = {"cli": "", "assembly": "", "config": "imports option modules alone"}
"""Rooms whose arrows would lead everywhere -> what is written instead; where it is empty, what they do not import."""
COLUMN, ROW, GAP, MARGIN = 210, 84, 30, 20
FONT = "font-family='system-ui, sans-serif'"


def room_of(module: str) -> str:
    """The room of `speakernet.room.file`; empty for what is not of the package."""
    words = module.split(".")
    return words[1] if words[0] == "speakernet" and len(words) > 1 else ""


@functools.cache
def imports() -> dict[str, set[str]]:
    """Room -> the rooms and single files of the package that its files import."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        rooms = found.setdefault(here, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                rooms |= {room_of(one.name) for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                rooms |= {room_of(f"{node.module}.{one.name}") for one in node.names}
        rooms -= {"", here}
    return found


def floor(graph: dict[str, set[str]]) -> list[str]:
    """What every room stands on: rooms and files that import none of `ROOMS`."""
    return sorted(name for name in graph if not name.startswith("__") and name not in ROOMS)


def arrows(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports between rooms that are drawn as arrows; one that a way over another room shows too is left out.

    Raises:
        ValueError: a room of the floor imports one that stands on it.
    """
    for name in floor(graph):
        if graph[name] & ROOMS.keys():
            raise ValueError(f"{name} imports {graph[name] & ROOMS.keys()}: give it a place in ROOMS")
    drawn = [(one, other) for one in ROOMS if one not in IN_WORDS for other in ROOMS if other in graph[one]]
    return [
        (one, other) for one, other in drawn if not any(other in graph[via] for start, via in drawn if start == one)
    ]


def note(name: str, graph: dict[str, set[str]]) -> list[str]:
    """The line of a room whose arrows are not drawn."""
    if name not in IN_WORDS:
        return []
    left_out = [other for other in ROOMS if other != name and other not in graph[name]]
    return [IN_WORDS[name] or "imports all other rooms" + (f" but {' and '.join(left_out)}" if left_out else "")]


def box(name: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of a room's box."""
    column, row, columns, _ = ROOMS[name]
    left, top = MARGIN + column * (COLUMN + GAP), MARGIN + row * (ROW + GAP)
    return left, top, columns * COLUMN + (columns - 1) * GAP, ROW


def draw() -> str:
    """The picture as SVG."""
    graph = imports()
    lines = [arrow(one, other) for one, other in arrows(graph)]
    for name, (_, row, _, words) in ROOMS.items():
        lines += drawn_box(*box(name), name, [words, *note(name, graph)], f"hsl({205 + 14 * row} 55% 93%)")
    rows = 1 + max(row for _, row, _, _ in ROOMS.values())
    width = 2 * MARGIN + 4 * COLUMN + 3 * GAP
    top = MARGIN + rows * (ROW + GAP)
    ground = floor(graph)
    half = -(-len(ground) // 2)
    words = [", ".join(ground[:half]) + ",", ", ".join(ground[half:])]
    lines += drawn_box(MARGIN, top, width - 2 * MARGIN, ROW, "the floor: all rooms import it, it imports none", words,
                       "hsl(40 40% 92%)")  # fmt: skip
    height = top + ROW + MARGIN
    title = "The rooms of speakernet: an arrow leads from a room to one that it imports"
    return "\n".join([
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' aria-label='{title}'>",
        f"<title>{title}</title>",
        "<defs><marker id='head' markerWidth='9' markerHeight='9' refX='8' refY='4.5' orient='auto'>"
        "<path d='M0,0 L9,4.5 L0,9 z' fill='#456'/></marker></defs>",
        f"<rect width='{width}' height='{height}' fill='white'/>", *lines, "</svg>", "",
    ])  # fmt: skip


def drawn_box(
    left: float, top: float, width: float, height: float, name: str, words: list[str], colour: str
) -> list[str]:
    """A box with a name and lines of words in it."""
    middle = left + width / 2
    lines = [
        f"<rect x='{left:g}' y='{top:g}' width='{width:g}' height='{height:g}' rx='8' fill='{colour}' stroke='#789'/>",
        f"<text x='{middle:g}' y='{top + 30:g}' {FONT} font-size='18' font-weight='600' text-anchor='middle'"
        f" fill='#123'>{escape(name)}</text>",
    ]
    for number, text in enumerate(words):
        lines.append(
            f"<text x='{middle:g}' y='{top + 52 + 18 * number:g}' {FONT} font-size='13' text-anchor='middle'"
            f" fill='#345'>{escape(text)}</text>"
        )
    return lines


def arrow(one: str, other: str) -> str:
    """A line from the lower edge of a room to the upper edge of another, where they overlap as far as they do."""
    left, top, width, height = box(one)
    other_left, other_top, other_width, _ = box(other)
    begin, end = max(left, other_left), min(left + width, other_left + other_width)
    middle = (begin + end) / 2 if begin < end else None
    start = middle if middle is not None else (left + width - 20 if other_left > left else left + 20)
    stop = middle if middle is not None else (other_left + 20 if other_left > left else other_left + other_width - 20)
    return (
        f"<line x1='{start:g}' y1='{top + height:g}' x2='{stop:g}' y2='{other_top:g}' stroke='#456'"
        " stroke-width='1.6' marker-end='url(#head)'/>"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
