"""Short passages and questions, written for tests/test_real.py: facts that a small model has to look up."""

from __future__ import annotations

from psearch_jax.types import Question
from retrieval.protocol import Passage

_PASSAGES = """
Danube|The Danube is a river of about 2,850 km that rises in the Black Forest and flows into the Black Sea.
Rhine|The Rhine is a river of about 1,230 km that rises in the Swiss Alps and flows into the North Sea.
Loire|The Loire, about 1,006 km long, is the longest river of France and flows into the Atlantic Ocean.
Elbe|The Elbe is a river of about 1,094 km that passes Dresden and Hamburg and flows into the North Sea.
Marie Curie|Marie Curie was born in Warsaw in 1867 and died in 1934. She discovered polonium and radium.
Lise Meitner|Lise Meitner was born in Vienna in 1878 and died in 1968. She helped to explain nuclear fission.
Emmy Noether|Emmy Noether was born in Erlangen in 1882 and died in Bryn Mawr in 1935. She was a mathematician.
Ada Lovelace|Ada Lovelace was born in London in 1815 and died there in 1852. She wrote about the Analytical Engine.
Charles Babbage|Charles Babbage was born in London in 1791 and died in 1871. He designed the Analytical Engine.
Alan Turing|Alan Turing was born in London in 1912 and died in Wilmslow in 1954. He was a mathematician.
Niels Bohr|Niels Bohr was born in Copenhagen in 1885 and died there in 1962. He was a physicist.
Johannes Kepler|Johannes Kepler was born in Weil der Stadt in 1571 and died in Regensburg in 1630.
Galileo Galilei|Galileo Galilei was born in Pisa in 1564 and died in Arcetri in 1642.
Mount Kilimanjaro|Mount Kilimanjaro in Tanzania is 5,895 m high, the highest mountain of Africa.
Mount Elbrus|Mount Elbrus in the Caucasus is 5,642 m high, the highest mountain of Russia.
Mont Blanc|Mont Blanc, on the border of France and Italy, is about 4,806 m high.
Aconcagua|Aconcagua in Argentina is 6,961 m high, the highest mountain of South America.
Reykjavik|Reykjavik is the capital of Iceland and has about 140,000 inhabitants.
Tallinn|Tallinn is the capital of Estonia and has about 450,000 inhabitants.
Lisbon|Lisbon is the capital of Portugal. It lies where the Tagus flows into the Atlantic Ocean.
"""
_QUESTIONS = """
Which river is longer, the Danube or the Rhine?
Which river is longer, the Loire or the Elbe?
Into which sea does the Elbe flow?
Who was born first, Marie Curie or Lise Meitner?
Who was born first, Emmy Noether or Niels Bohr?
Who lived longer, Ada Lovelace or Charles Babbage?
In which city was Alan Turing born?
Were Johannes Kepler and Galileo Galilei born in the same town?
Which mountain is higher, Mount Elbrus or Mount Kilimanjaro?
Which mountain is higher, Mont Blanc or Aconcagua?
Which capital has more inhabitants, Reykjavik or Tallinn?
Which river reaches the ocean at Lisbon?
"""


def passages() -> list[Passage]:
    """The 20 passages."""
    rows = [line.split("|") for line in _PASSAGES.strip().splitlines()]
    return [Passage(f"real-{i}", title, text) for i, (title, text) in enumerate(rows)]


def questions() -> list[Question]:
    """The 12 questions, without answers: no test uses them."""
    return [Question("real", str(i), text, (), "single") for i, text in enumerate(_QUESTIONS.strip().splitlines())]
