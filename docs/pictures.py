"""The drawings of the pages, as SVG: `python docs/pictures.py` writes them into docs/_static.

Colours are readable on light and on dark ground; schedules are those of `autoshard.pipeline`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INK, BLUE, ORANGE, GREEN, RED = "#767d89", "#3b7dd8", "#c77416", "#2f9461", "#c2514f"
FONT = 'font-family="system-ui, sans-serif" font-size="13"'


def text(x: float, y: float, words: object, anchor: str = "start", colour: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" {FONT}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, words: object = "") -> str:
    inside = text(x + width / 2, y + height / 2 + 4.5, words, "middle", "#fff") if words != "" else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}"/>{inside}'


def line(points: Iterable[tuple[float, float]], colour: str = INK, dashed: bool = False, width: float = 1.5) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dash}/>'


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>"]) + "\n"


def torus() -> str:
    """A slice of 4 x 4 chips with a mesh of data=4, model=4: each axis runs along one dimension of the wires."""
    parts, left, top, gap = [], 60, 50, 78
    for k in range(4):
        x, y = left + k * gap, top + k * gap
        parts += [line([(left - 22, y + 18), (left + 3 * gap + 62, y + 18)], BLUE, width=2.5)]
        parts += [line([(x + 20, top - 18), (x + 20, top + 3 * gap + 54)], ORANGE, width=2.5)]
    for row in range(4):
        parts += [box(left + column * gap, top + row * gap, 40, 36, INK, f"{row},{column}") for column in range(4)]
    right = left + 3 * gap + 74
    parts += [text(right, top + 22, "model: along the rows", colour=BLUE), text(left - 6, 22, "data: along the columns", colour=ORANGE)]
    return picture(560, 372, "A mesh of data=4 and model=4 placed on a 4 x 4 torus", parts)


def memory() -> str:
    """Live bytes of a step of six layers: all activations kept, and each layer's computed again."""
    layers, state = 6, 1.0
    kept = [(0.0, state), *((k, state + 0.8 * k) for k in range(1, layers + 1))]
    kept += [(layers + 2 * k, state + 0.8 * (layers - k) + 0.3) for k in range(layers + 1)]
    again = [(0.0, state), *((k, state + 0.12 * k) for k in range(1, layers + 1))]
    for k in range(layers):
        low, at = state + 0.12 * (layers - k), layers + 3 * k
        again += [(at + 1, low + 0.8), (at + 3, low - 0.12 + 0.3)]

    def curve(points, colour):
        return line([(60 + 19 * x, 230 - 34 * y) for x, y in points], colour, width=2.5)

    parts = [
        line([(60, 20), (60, 230), (545, 230)]),
        line([(60, 230 - 34 * state), (545, 230 - 34 * state)], dashed=True),
        text(548, 234 - 34 * state, "state"),
        text(60, 14, "bytes of one device"),
        text(545, 250, "time", "end"),
        line([(60 + 19 * layers, 20), (60 + 19 * layers, 230)], dashed=True),
        text(60 + 19 * layers / 2, 250, "forward", "middle"),
        text(60 + 19 * layers + 60, 250, "backward", "middle"),
        curve(kept, BLUE),
        curve(again, ORANGE),
        text(250, 52, "everything kept: fast, a high peak", colour=BLUE),
        text(392, 150, "layers computed again: slower, a low peak", colour=ORANGE),
    ]
    return picture(700, 262, "Memory of a step over time, with and without recomputation", parts)


def schedule() -> str:
    """GPipe and 1F1B on four stages and six microbatches: tasks by start, and the time in which stages wait."""
    parts, top = [], 28
    named = {"gpipe": "gpipe", "1f1b": "1f1b: the same bubble, fewer microbatches in memory", "zero_bubble": "zero_bubble"}
    colours = {"F": BLUE, "B": ORANGE, "W": GREEN}
    for name, words in named.items():
        tasks, end = started(name, stages=4, microbatches=6)
        scale = 610 / 30
        parts.append(text(60, top - 8, words))
        for stage in range(4):
            y = top + 24 * stage
            parts.append(text(52, y + 15, f"stage {stage}", "end"))
            parts.append(f'<rect x="60" y="{y}" width="{end * scale:g}" height="20" fill="{INK}" fill-opacity="0.18"/>')
            for at, time, task in tasks[stage]:
                parts.append(box(60 + at * scale + 0.5, y, time * scale - 1, 20, colours[task.kind], task.microbatch))
        top += 24 * 4 + 34
    parts += [text(60, top - 8, "forward", colour=BLUE), text(125, top - 8, "backward", colour=ORANGE)]
    parts += [text(205, top - 8, "gradients of weights", colour=GREEN), text(350, top - 8, "grey: the stage waits (the bubble)")]
    return picture(690, top + 4, "Schedules of a pipeline of four stages and six microbatches", parts)


def started(name: str, stages: int, microbatches: int):
    """Tasks of each stage as (start, time, task), and the end: forward takes 1, backward 2, or 1 where gradients of weights are apart."""
    from autoshard.pipeline.scheduling import schedule_of

    orders = schedule_of(name, stages, microbatches).orders
    apart = any(task.kind == "W" for order in orders for task in order)
    takes = {"F": 1, "B": 1 if apart else 2, "W": 1}
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    found = [[] for _ in range(stages)]
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                task = orders[stage][at[stage]]
                before_backward = ("B", stage + 1) if stage + 1 < stages else ("F", stage)
                needed = {"F": ("F", stage - 1), "B": before_backward, "W": ("B", stage)}[task.kind]
                key = (*needed, task.microbatch)
                if needed[1] >= 0 and key not in done:
                    break
                start = max(free[stage], done.get(key, 0.0))
                free[stage] = done[task.kind, stage, task.microbatch] = start + takes[task.kind]
                found[stage].append((start, takes[task.kind], task))
                at[stage] += 1
    return found, max(free)


def padding() -> str:
    """Ten rows on four devices: not divisible, and padded to twelve."""
    parts = [text(20, 22, "10 rows on 4 devices: no equal shards"), text(330, 22, "padded to 12: three rows a device")]
    for row in range(10):
        parts.append(box(20, 34 + 20 * row, 120, 17, INK, row))
    colours = (BLUE, ORANGE, GREEN, RED)
    for row in range(12):
        y = 34 + 20 * row + 6 * (row // 3)
        colour = colours[row // 3]
        if row < 10:
            parts.append(box(330, y, 120, 17, colour, row))
        else:
            parts.append(f'<rect x="330.5" y="{y}" width="119" height="17" rx="3" fill="none" stroke="{colour}" stroke-dasharray="4 3"/>')
            parts.append(text(390, y + 13, "padding", "middle", colour))
        if row % 3 == 1:
            parts.append(text(462, y + 13, f"device {row // 3}", colour=colour))
    return picture(560, 306, "A dimension of ten rows padded to twelve on four devices", parts)


PICTURES = {"torus": torus, "memory": memory, "schedule": schedule, "padding": padding}


def main() -> None:
    """Writes all pictures."""
    sys.path.insert(0, str(ROOT))
    for name, draw in PICTURES.items():
        (ROOT / "docs" / "_static" / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
