"""The picture of `docs/architecture.md`: the package's folders in layers, drawn from its imports; `python docs/architecture_picture.py`.

A folder is above all that import it. Lines are imports that no path of other lines makes. `tests/test_readme.py` draws it again.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autoshard"
PICTURE = ROOT / "docs" / "_static" / "architecture.svg"
LEFT_OUT = {"__init__", "__main__"}
BOX, GAP, ROW, MARGIN = (124, 24), 12, 62, 10  # pixels


def imports() -> networkx.DiGraph:
    """The folders and modules of the package, each with an edge to those that import it."""
    graph = networkx.DiGraph()
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - LEFT_OUT
    graph.add_nodes_from(sorted(names))
    for file in sorted(PACKAGE.rglob("*.py")):
        here = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autoshard":
                _, _, inside = str(node.module).partition(".")
                found = {inside.split(".")[0]} if inside else {alias.name for alias in node.names}
                graph.add_edges_from((there, here) for there in sorted(found & names) if here in names and here != there)
    return graph


def places(graph: networkx.DiGraph) -> dict[str, tuple[float, float]]:
    """The upper left corner of each box: rows by the longest path of imports, within a row near what it imports."""
    rows = [sorted(row) for row in networkx.topological_generations(graph)]
    width = max(map(len, rows)) * (BOX[0] + GAP)
    found: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        ordered = sorted(row, key=lambda name: (_centre([found[each][0] for each in graph.predecessors(name)]), name)) if number else row
        left = MARGIN + (width - len(row) * (BOX[0] + GAP)) / 2
        found |= {name: (left + k * (BOX[0] + GAP), MARGIN + number * ROW) for k, name in enumerate(ordered)}
    return found


def _centre(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def drawn(graph: networkx.DiGraph, at: Mapping[str, tuple[float, float]]) -> str:
    """The picture, as SVG that reads on light and dark pages."""
    (width, height), lines = BOX, networkx.transitive_reduction(graph)
    size = max(x for x, _ in at.values()) + width + MARGIN, max(y for _, y in at.values()) + height + MARGIN
    box = f'viewBox="0 0 {size[0]:.0f} {size[1]:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="system-ui, sans-serif" font-size="12">',
        "<title>Folders of autoshard: each is above those that import it</title>",
    ]
    for above, below in sorted(lines.edges):
        (x, y), (u, v) = at[above], at[below]
        x, y, u = x + width / 2, y + height, u + width / 2
        bend = (v - y) / 2
        curve = f"M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {u:.0f} {v - bend:.0f} {u:.0f} {v:.0f}"
        parts.append(f'<path d="{curve}" fill="none" stroke="#8899aa"/>')
    for name, (x, y) in sorted(at.items()):
        parts.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{width}" height="{height}" rx="5" fill="#2f6f9f"/>')
        parts.append(f'<text x="{x + width / 2:.0f}" y="{y + 16:.0f}" text-anchor="middle" fill="#ffffff">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draws it."""
    graph = imports()
    PICTURE.write_text(drawn(graph, places(graph)), encoding="utf-8")


if __name__ == "__main__":
    main()
