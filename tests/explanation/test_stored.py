"""What a strategy's file keeps of its program comes back as it was, or is refused."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategy_records import EXAMPLE, PIPELINED

from autoshard.errors import StrategyError
from autoshard.explanation import explanation_of
from autoshard.explanation.stored import packed, unpacked

WHOLE = st.integers(-(2**60), 2**60) | st.booleans()
WORDS = st.text(max_size=3)
NUMBERS = st.lists(WHOLE, max_size=12) | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3)
INNER = st.recursive(
    NUMBERS | WORDS | st.none(), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text("ab+"), x, max_size=3), max_leaves=6
)
PAGES = st.dictionaries(WORDS, INNER, max_size=3)
EXPLAINED = explanation_of(EXAMPLE)


@settings(max_examples=10)
@given(page=PAGES)
@example(page={"+": [], "++": {"+": None}})
def test_any_page_comes_back(page):
    """Numbers, whole or not, and of any size; texts, lists and objects."""
    assert unpacked(packed(EXPLAINED, page))[1] == page


@pytest.mark.parametrize("record", [EXAMPLE, PIPELINED])
def test_explanations_come_back(record):
    """With their specs, stages and groups, in the types that they have."""
    assert unpacked(packed(explanation_of(record), {}))[0] == explanation_of(record)


def test_layers_alike_add_little():
    """Times that start anew in each layer are written once."""
    layer = [3, 5, 8, 13, 21, 34, 55, 89]
    few, many = ({"start": [100 * n + each for n in range(layers) for each in layer]} for layers in (8, 512))
    assert len(packed(explanation_of(EXAMPLE), many)) - len(packed(explanation_of(EXAMPLE), few)) < 100


@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda text: text[:40] + "!" + text[41:], lambda text: "", lambda text: '"'])
def test_what_is_damaged_is_refused(damage):
    """Whatever is wrong with it, with what to do."""
    with pytest.raises(StrategyError, match="report in the strategy's file cannot be read"):
        unpacked(damage(packed(explanation_of(EXAMPLE), {"a": [*range(100)]})))
