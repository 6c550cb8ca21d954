"""Reports are made of data: no module that shows a collective takes its words apart again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

API = Path(__file__).resolve().parents[1] / "autoshard"
SHOW = ("explanation/explain.py", "ask/costs.py", "ask/verification.py", "plan/notes.py")
REPORTS = sorted([*(API / name for name in SHOW), *(API / "cli").glob("*.py")])
WORDS = {"source", "tensor", "cause"}
TAKE_APART = {
    *("split", "rsplit", "splitlines", "partition", "rpartition", "removeprefix", "removesuffix", "replace", "startswith", "endswith"),
    *("find", "rfind", "index", "strip", "lstrip", "rstrip", "translate"),
}


def taken_apart(source: str) -> Iterator[str]:
    """Where a module hands words of a collective to `re`, to a method that takes text apart, to ``in`` or to an index."""
    tree = ast.parse(source)
    named: set[str] = set()

    def words(node: ast.AST) -> bool:
        """Whether an expression is, or holds, such words."""
        return any(
            (isinstance(part, ast.Attribute) and part.attr in WORDS) or (isinstance(part, ast.Name) and part.id in named)
            for part in ast.walk(node)
        )

    for node in ast.walk(tree):  # names that stand for words
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None and words(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value, ast.Attribute | ast.JoinedStr):
                named |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, arguments = node.func.value, [*node.args, *(keyword.value for keyword in node.keywords)]
            of_re = isinstance(owner, ast.Name) and (owner.id == "re" or owner.id.isupper() or owner.id.startswith("_"))
            if of_re and any(map(words, arguments)):
                yield f"line {node.lineno}: {ast.unparse(node)}"
            if node.func.attr in TAKE_APART and words(owner):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("pattern", "starred", "numbered"):
            if any(map(words, node.args)):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            if any(isinstance(side, ast.Attribute) and side.attr in WORDS for side in node.comparators):
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("file", REPORTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_report_takes_words_apart(file):
    """What a report says of a collective comes from its op, value and reason."""
    assert not list(taken_apart(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "source",
    [
        "name = collective.tensor.rpartition(' ')",
        "words = collective.cause\nwords.split(':')",
        "re.sub('x', '', each.source)",
        "_INDEX.sub('*', each.cause)",
        "pattern(each.cause)",
        "'whole' in each.cause",
        "f'{each.source}'.partition(' ')",
    ],
)
def test_words_taken_apart_are_seen(source):
    """Each way of reading English again is found."""
    assert list(taken_apart(source))


@pytest.mark.parametrize("source", ["key = each.tensor, each.source", "f'for {each.source}'", "replace(each, op=None)", "text.split(',')"])
def test_words_that_are_shown_pass(source):
    """Showing words, and taking apart what a user typed, is fine."""
    assert not list(taken_apart(source))
