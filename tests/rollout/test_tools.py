"""Tools: one batch per tool, and no failure of a tool ends a rollout."""

import re
import threading

import pytest
from calls import ADA, ALAN, SUM, block, give, tool_collector
from helpers import question, random_params, retriever
from written import CONFIG

from psearch_jax.rollout.calculator import CALCULATOR, evaluate
from psearch_jax.rollout.tools import Tool, Toolbox, from_function
from psearch_jax.text.tool_calls import write_calls
from psearch_jax.types import TOOL_ERROR, TOOL_TIMEOUT, Call, UserError
from retrieval.protocol import RetrievalError

ANY = {"type": "object"}


def texts(results):
    return {order: [[p.text for p in ranking] for ranking in of_rollout] for order, of_rollout in results.items()}


def test_every_tool_gets_one_batch(monkeypatch):
    """The calls of all rollouts run once per tool, and each gets its own result."""
    batches, service = [], retriever()
    double = Tool("double", "", ANY, lambda calls: batches.append(calls) or [str(2 * c["n"]) for c in calls])
    search = service.search
    monkeypatch.setattr(service, "search", lambda queries, k: batches.append(queries) or search(queries, k))
    tools = Toolbox(service, 1, (double, CALCULATOR))
    calls = {4: (ADA, Call("double", '{"n": 4}')), 7: (Call("double", '{"n": 7}'), SUM, ALAN)}
    results = texts(tools.run(calls))
    assert len(batches) == 2 and ["Ada born", "Alan born"] in batches and [{"n": 4}, {"n": 7}] in batches
    assert results == {
        4: [["Ada Lovelace was born in 1815."], ["8"]],
        7: [["14"], ["3"], ["Alan Turing was born in 1912."]],
    }


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Call("nothing", "{}"), "no tool 'nothing', there are: search, calculator"),
        (Call("search", ""), "query: a text is required"),
        (Call("calculator", "{}"), "'expression' is a required property"),
        (Call("calculator", '{"expression": 5}'), "expression: 5 is not of type 'string'"),
        (Call("calculator", f'{{"expression": {"[" * 500}{"]" * 500}}}'), "expression: [[[["),
        (Call("calculator", '{"expression": "1 +"}'), "invalid syntax"),
        (Call("calculator", '{"expression": "1 + 1"}', 2), "all 2 calls of calculator were made"),
    ],
)
def test_a_bad_call_gets_one_line_and_the_others_run(call, reason):
    result = Toolbox(None, 1, (CALCULATOR,), budget=2).run({0: (SUM, call)})[0]
    assert [p.text for p in result[0]] == ["3"] and result[1][0].id == TOOL_ERROR
    assert result[1][0].text.startswith("error: ") and reason in result[1][0].text


def crash(calls):
    raise SystemExit("gone\naway")


def test_a_tool_that_crashes_or_hangs_costs_its_own_calls():
    """A batch that hangs is waited for once; until it ends, other calls fail. Errors of the search are raised."""
    release = threading.Event()
    hanging = Tool("hang", "", ANY, lambda calls: [str(release.wait(60))] * len(calls), timeout_s=0.2)
    short = Tool("short", "", ANY, lambda calls: [])
    tools = Toolbox(None, 1, (hanging, short, Tool("crash", "", ANY, crash)))
    calls = {0: tuple(Call(name, "{}") for name in ("hang", "short", "crash"))}
    first, second = tools.run(calls)[0], tools.run(calls)[0]
    assert [p.id for (p,) in first] == [p.id for (p,) in second] == [TOOL_TIMEOUT, TOOL_ERROR, TOOL_ERROR]
    assert "no response in 0.2 s" in first[0][0].text and "does not respond" in second[0][0].text
    assert first[2][0].text == "error: SystemExit: gone"
    release.set()
    tools._running["hang"].result()
    assert texts(tools.run(calls))[0][0] == ["True"]

    class Broken:
        def search(self, queries, k):
            raise RetrievalError("gone")

    with pytest.raises(RetrievalError):
        Toolbox(Broken(), 1).run({0: (ADA,)})


def weather(city: str, days: int = 1) -> str:
    """Returns the weather.

    Args:
        city: The name of a city.
        days: How many days ahead.
    """
    return f"{'rain' if days else 1 / 0} in {city}"


def test_a_function_is_a_tool():
    """Its schema comes from its signature and docstring; an exception fails its own call."""
    tool = from_function(weather)
    assert tool.parameters["required"] == ["city"] and tool.description == "Returns the weather."
    calls = {0: (Call("weather", '{"city": "Bern"}'), Call("weather", '{"city": "Bern", "days": 0}'))}
    assert texts(Toolbox(None, 1, (tool,)).run(calls))[0] == [
        ["rain in Bern"],
        ["error: ZeroDivisionError: division by zero"],
    ]
    with pytest.raises(UserError, match="crash: .*accepted: a function with type hints"):
        from_function(crash)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1954 - 1921", "33"),
        ("(3 + 4) * -2 / 4", "-3.5"),
        ("3 < 5", "yes"),
        ('years("4 September 1908", "July 1, 1999")', "90"),
        ('days("1 January 2000", "1 March 2000")', "60"),
        ("max(3, abs(-5))", "5"),
    ],
)
def test_the_calculator(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x", "1 / 0", "2 ** 9", "9" * 301, "__import__('os')", "'a' * 9", "days('never', 1)", "(" * 150 + ")" * 150]
    + ["(1).real", "max(*[1])", "9999999999 * 9999999999 * 9999999999 * 9999999999", "1e308 * 10", "lambda: 1"]
    + ["'a'.rjust(9)", "'%9d' % 1", "(1).to_bytes(9, 'big')", "1; 2", "a = 1", "2 and 3", "'ab'[0]"],
)
def test_the_calculator_refuses_everything_else(expression):
    (text,) = CALCULATOR.batch([{"expression": expression}])
    assert text.startswith("error: ") and "\n" not in text


@pytest.fixture(scope="module")
def rollouts(tiny_tokenizer):
    """From scripts to trajectories with tool calls, and to their cost; everything but the sampled tokens is real."""
    params = random_params(CONFIG, seed=2)

    def run(*scripts, tools=(CALCULATOR,), **options):
        collector = tool_collector(tiny_tokenizer, tools, **options)
        questions = [question(i, "?") for i in range(len(scripts))]
        give(collector, 0, [(q, 0) for q in questions], scripts)
        stream = collector.stream(1, 0)
        stream.add(questions, 0)
        trajectories = stream.collect(lambda: collector.sampler.weights(params), 0, 1.0)
        return trajectories, stream.spent(), collector.tokenizer

    return run


THINK = "<think>a</think>\n"
ANSWER = THINK + "<answer>1815</answer>"


def test_a_rollout_calls_tools_in_parallel(rollouts):
    """Results follow the stop token with loss mask 0; calls of one turn count as a split search."""
    (t, other), usage, tokenizer = rollouts([THINK + write_calls([ADA, SUM]), ANSWER], [ANSWER])
    first, last = t.turns
    assert t.status == other.status == "answered" and t.answer == "1815" and t.well_formed and t.decomposed
    assert first.calls == (ADA, SUM) and first.shown == (("Ada Lovelace was born in 1815.",), ("3",))
    assert first.n_sampled + last.n_sampled == t.mask.sum() and usage.tool_errors == 0
    text = tokenizer.decode(t.ids, control=True)
    assert text.endswith(
        write_calls([ADA, SUM]) + "<|im_end|>\n<|im_start|>user\n<tool_response>\nAda Lovelace was born in 1815.\n\n"
        "</tool_response>\n<tool_response>\n3\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        + ANSWER
        + "<|im_end|>"
    )
    observed = tokenizer.decode(t.ids[t.prompt_length :][~t.mask[t.prompt_length :]], control=True)
    assert observed.startswith("\n<|im_start|>user\n<tool_response>") and observed.endswith("assistant\n")


def test_what_a_rollout_does_wrong_is_corrected(rollouts):
    """Malformed JSON, a reply cut by its budget, a result that the model begins itself, and calls over the budget."""
    cut = "<tool_call>" + "x" * 400 + "..."
    (bad, long, forging, greedy), usage, tokenizer = rollouts(
        [THINK + block("{"), ANSWER],
        [cut, ANSWER],
        [THINK + write_calls([SUM]) + "\n<tool_response>...", ANSWER],
        [THINK + write_calls([SUM]), THINK + write_calls([SUM]), ANSWER],
        tool_budget=1,
    )
    for t in (bad, forging, greedy):
        assert t.status == "answered" and t.answer == "1815", tokenizer.decode(t.ids, control=True)
    assert not bad.turns[0].calls and "No tool call and no answer" in tokenizer.decode(bad.ids)
    assert "x<|im_end|>\n<|im_start|>user\nNo tool call" in tokenizer.decode(long.ids, control=True)
    assert forging.turns[0].calls == (SUM,) and not forging.turns[0].well_formed
    assert re.search("<tool_response>x?<\\|im_end\\|>", tokenizer.decode(forging.ids, control=True))
    assert greedy.turns[1].shown == (("error: all 1 calls of calculator were made",),) and usage.tool_errors == 1
    assert usage.metrics()["cost/tool_errors"] == 1


def test_a_hanging_tool_ends_no_rollout(rollouts):
    hanging = Tool("hang", "", ANY, lambda calls: [str(threading.Event().wait(20))], timeout_s=0.1)
    (t,), usage, _ = rollouts([THINK + write_calls([Call("hang", "{}"), ADA]), ANSWER], tools=(hanging,))
    assert t.status == "answered" and usage.tool_timeouts == usage.tool_errors == 1
    assert [p.title for p in t.turns[0].passages[1]] == ["Ada Lovelace"]
