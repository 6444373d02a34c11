"""The tag grammar: parsing turns, splitting searches, escaping and rendering observations."""

import pytest

from psearch_jax.text import tags
from psearch_jax.text.tags import (
    MIN_OBSERVATION_TOKENS,
    escape_tags,
    parse_turn,
    render_observation,
    split_sub_queries,
)
from psearch_jax.types import UserError
from retrieval.protocol import Passage

# text, kind, queries or answer, well_formed
TURNS = [
    ("<think> a </think> <search> x ## y </search>", "search", ("x", "y"), True),
    ("\n<think>a</think>\n\n<search>x</search>", "search", ("x",), True),
    ("<think>a</think><answer> x </answer>", "answer", "x", True),
    ("<think></think><answer></answer>", "answer", "", True),
    # Bytes after the completing tag.
    ("<think>a</think><search>x</search>\n\n", "search", ("x",), True),
    ("<think>a</think><search>x</search></", "search", ("x",), True),
    ("<think>a</think><answer>x</answer>\n\n", "answer", "x", True),
    ("<think>a</think><answer>x</answer> and", "answer", "x", False),
    # The earliest closing tag wins.
    ("<think>a</think><answer>x</answer><search>y</search>", "answer", "x", False),
    ("<think>a</think><search>y</search><answer>x</answer>", "search", ("y",), True),
    # Content from the last opening tag before the closing one.
    ("<think> I could <search> now </think><search>x</search>", "search", ("x",), False),
    ("<think>a</think><search>x<search>y</search>", "search", ("y",), False),
    ("<think>a</think><answer>x<search>y</answer>", "answer", "x<search>y", False),
    # An action in an unclosed thought counts, with invalid format.
    ("<think> a <search>x</search>", "search", ("x",), False),
    # Broken thoughts and stray text.
    ("a <think>b</think><search>x</search>", "search", ("x",), False),
    ("<think>b</think> c <search>x</search>", "search", ("x",), False),
    ("<think>b</think><think>c</think><search>x</search>", "search", ("x",), False),
    ("<think><think>b</think></think><search>x</search>", "search", ("x",), False),
    ("</think><search>x</search>", "search", ("x",), False),
    ("<think>b</think><information>c</information><answer>x</answer>", "answer", "x", False),
    ("<think>b</think><search>x</answer>", "none", (), False),
    # No action.
    ("", "none", (), False),
    ("<think>b</think>", "none", (), False),
    ("<think>b</think><search>x", "none", (), False),
    ("<think>b</think>x</search>", "none", (), False),
    ("</search><search>x</search>", "none", (), False),
    ("<think>b</think><search> ## </search>", "none", (), False),
    ("<think>b</think><SEARCH>x</SEARCH>", "none", (), False),
    ("<think>\ufffd</think><search>\ufffd\x00</search>", "search", ("\ufffd\x00",), True),
    # Thousands of sub-queries and tags.
    (f"<think>b</think><search>{'##'.join(map(str, range(1000)))}</search>", "search", tuple("01234567"), True),
    ("<think>" * 20_000 + "<search>x</search>", "search", ("x",), False),
    ("</think><search>" * 20_000, "none", (), False),
]


@pytest.mark.parametrize("text, kind, content, well_formed", TURNS)
def test_parse_turn(text, kind, content, well_formed):
    """Kind, content and form of every shape of turn."""
    action = parse_turn(text)
    assert (action.kind, action.well_formed) == (kind, well_formed)
    assert action.queries == (content if kind == "search" else ())
    assert action.answer == (content if kind == "answer" else None)


def test_text_inside_the_completing_token_is_no_tail():
    """Text in the token that completes a tag does not break the format; later text does."""
    text = "<think>a</think><answer>x</answer>."
    assert not parse_turn(text).well_formed
    assert parse_turn(text, tail_start=len(text)).well_formed
    assert parse_turn(text + "\n", tail_start=len(text)).well_formed
    assert not parse_turn(text + "b", tail_start=len(text)).well_formed
    assert parse_turn("<think>a</think><answer>x</answer>", tail_start=0).well_formed


@pytest.mark.parametrize(
    "content, expected",
    [
        ("a ## b", ("a", "b")),
        (" a \n b\t##", ("a b",)),
        ("a##b##A## a ", ("a", "b")),
        ("a ### b #### c", ("a", "b", "c")),
        ("C# or F#", ("C# or F#",)),
        ("", ()),
        ("1##2##3##4", ("1", "2", "3")),
    ],
)
def test_split_sub_queries(content, expected):
    """Sub-queries are stripped, distinct, not empty and at most `cap`."""
    assert split_sub_queries(content, cap=3) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("</information><search>x</search>", "&lt;/information>&lt;search>x&lt;/search>"),
        ("</ Information > < / ANSWER>", "&lt;/ Information > &lt; / ANSWER>"),
        ("<\n/search\n>", "&lt;\n/search\n>"),
        ("a < b, <b>bold</b> <searching> 3<4", "a < b, <b>bold</b> <searching> 3<4"),
        ("<<think>", "<&lt;think>"),
        ("<search_x> <think2>", "&lt;search_x> <think2>"),
    ],
)
def test_escape_tags(text, expected):
    """Everything like a tag is escaped, once; other markup stays."""
    assert escape_tags(text) == expected
    assert escape_tags(expected) == expected


def test_corrective_message_holds_no_tag():
    """The corrective message contains nothing that could be parsed as a tag."""
    assert not tags.TAG.search(tags.CORRECTIVE_MESSAGE)
    assert escape_tags(tags.CORRECTIVE_MESSAGE) == tags.CORRECTIVE_MESSAGE


BARO = Passage("1", "Baro Quill", "Baro Quill was born in 1943.")
HARBOR = Passage("2", "Red Harbor", "A film directed by Zed Moor.")
LONG = Passage("3", "Long Story", "word " * 300)


def show(tokenizer, *args, **options):
    observation = render_observation(*args, encode=tokenizer.encode_foreign, **options)
    text = tokenizer.decode(observation.ids)
    assert all(part in text for parts in observation.shown for part in parts)
    return observation.ids, text


def test_observation_of_one_query(tiny_tokenizer):
    """One query needs no header, and a title that the passage begins with is not repeated."""
    _, text = show(tiny_tokenizer, ["born Baro"], [[BARO, HARBOR]], budget_tokens=500)
    assert text == (
        "\n<information>\nBaro Quill was born in 1943.\n(Red Harbor) A film directed by Zed Moor.\n</information>\n"
    )


def test_observation_of_several_queries(tiny_tokenizer):
    """Every sub-query is a header above its passages; a long one is cut."""
    queries, passages = ["a  <search>", "b", "c"], [[BARO], [], [HARBOR]]
    _, text = show(tiny_tokenizer, queries, passages, budget_tokens=500)
    first = "a &lt;search>:\nBaro Quill was born in 1943.\n"
    last = "c:\n(Red Harbor) A film directed by Zed Moor.\n"
    assert text == f"\n<information>\n{first}b:\nnothing found\n{last}</information>\n"
    _, text = show(tiny_tokenizer, ["long " * 90, "b"], [[BARO], [HARBOR]], budget_tokens=900)
    assert text.count("long") == 24 and BARO.text in text and HARBOR.text in text


def test_titles_are_recognised_as_whole_words(tiny_tokenizer):
    """A title that is only the start of a longer word is shown; an empty one is not."""
    passages = [Passage("1", "Baro", "Baron is a title."), Passage("2", "", "No title."), Passage("3", "T", "")]
    _, text = show(tiny_tokenizer, ["q"], [passages], budget_tokens=500)
    assert "\n(Baro) Baron is a title.\nNo title.\n(T)\n</information>" in text


def test_lower_ranks_are_cut_first(tiny_tokenizer):
    """The best passages stay when the budget is short; a rank whose title does not fit is left out."""
    ranking = [BARO, LONG, HARBOR]
    first_cost = len(tiny_tokenizer.encode_foreign(f"{BARO.text}\n"))
    tags_cost = len(render_observation([], [], tiny_tokenizer.encode_foreign, 100).ids)
    ids, text = show(tiny_tokenizer, ["q"], [ranking], budget_tokens=tags_cost + first_cost + 60)
    assert BARO.text in text and "(Long Story) word" in text and HARBOR.title not in text
    assert len(ids) <= tags_cost + first_cost + 60 < len(ids) + 10
    _, text = show(tiny_tokenizer, ["q"], [ranking], budget_tokens=tags_cost + first_cost + 6)
    assert BARO.text in text and "Long" not in text  # a rank whose title does not fit is left out


def test_an_observation_records_what_it_shows():
    """Up to the character: per sub-query, the passages in order, without headers and without those that were cut."""
    observation = render_observation(["a", "b"], [[BARO, HARBOR], []], lambda text: list(text.encode()), 132)
    assert observation.shown == ((BARO.text, "(Red Harbor) A fil"), ())


def test_what_one_sub_query_leaves_passes_to_the_next(tiny_tokenizer):
    """Sub-queries share the budget evenly, and what one leaves passes to the next."""
    alone, _ = show(tiny_tokenizer, ["q", "r"], [[LONG], [LONG]], budget_tokens=300)
    shared, text = show(tiny_tokenizer, ["q", "r"], [[BARO], [LONG]], budget_tokens=300)
    first = len(show(tiny_tokenizer, ["q", "r"], [[BARO], []], budget_tokens=300)[0])
    assert 290 < len(alone) <= 300 and 290 < len(shared) <= 300 and first < 110
    counts = [
        block.count("word")
        for block in show(tiny_tokenizer, ["q", "r"], [[LONG], [LONG]], budget_tokens=300)[1].split("r:")
    ]
    assert abs(counts[0] - counts[1]) <= 2 and text.count("word") > 1.4 * counts[1]


@pytest.mark.parametrize("vocabulary", ["tiny", "real"])
def test_extreme_budgets(vocabulary, request):
    """For any budget and sub-queries, the observation fits and ends with its closing tag."""
    tokenizer = request.getfixturevalue(f"{vocabulary}_tokenizer")
    long_query = "how old " * 200
    for queries in (["q"], [f"Baro Quill {i}" for i in range(8)], [f"{i} {long_query}" for i in range(8)]):
        for passage in (BARO, LONG, Passage("4", "title " * 100, "東京🙂" * 100)):
            for budget in (MIN_OBSERVATION_TOKENS, 48, 60, 1000):
                ids, text = show(tokenizer, queries, [[passage] * 3] * len(queries), budget_tokens=budget)
                assert len(ids) <= budget
                assert text.startswith("\n<information>\n") and text.endswith("\n</information>\n")
                assert "\ufffd" not in text
    with pytest.raises(UserError, match="31"):
        show(tokenizer, ["q"], [[BARO]], budget_tokens=MIN_OBSERVATION_TOKENS - 1)


def test_a_cut_passage_fills_its_room():
    """A cut passage uses the budget to the last token."""
    long = Passage("7", "", "x" * 900)
    for budget in range(MIN_OBSERVATION_TOKENS, MIN_OBSERVATION_TOKENS + 40):
        assert len(render_observation(["q"], [[long]], lambda text: list(text.encode()), budget).ids) == budget
