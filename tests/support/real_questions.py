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
Canberra|Canberra is the capital of Australia. It was founded in 1913.
Brasilia|Brasilia has been the capital of Brazil since 1960. Oscar Niemeyer designed many of its buildings.
Oscar Niemeyer|Oscar Niemeyer was an architect who was born in Rio de Janeiro in 1907 and died in 2012.
Sydney Opera House|The Sydney Opera House was designed by Jørn Utzon and opened in 1973.
Jørn Utzon|Jørn Utzon was an architect who was born in Copenhagen in 1918 and died in 2008.
Eiffel Tower|The Eiffel Tower in Paris was completed in 1889 and is 330 m high.
Brandenburg Gate|The Brandenburg Gate in Berlin was completed in 1791.
Don Quixote|Don Quixote is a novel by Miguel de Cervantes. Its first part was published in 1605.
Miguel de Cervantes|Miguel de Cervantes was born in Alcalá de Henares in 1547 and died in Madrid in 1616.
Frankenstein|Frankenstein is a novel by Mary Shelley, published in 1818.
Mary Shelley|Mary Shelley was born in London in 1797 and died there in 1851.
The Magic Flute|The Magic Flute is an opera by Wolfgang Amadeus Mozart, first performed in Vienna in 1791.
Wolfgang Amadeus Mozart|Wolfgang Amadeus Mozart was born in Salzburg in 1756 and died in Vienna in 1791.
Fidelio|Fidelio is the only opera by Ludwig van Beethoven. It was first performed in Vienna in 1805.
Ludwig van Beethoven|Ludwig van Beethoven was baptised in Bonn in 1770 and died in Vienna in 1827.
Oxygen|Oxygen is a chemical element with atomic number 8. Its symbol is O.
Tungsten|Tungsten is a chemical element with atomic number 74. Its symbol is W.
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
When was the capital of Australia founded?
Where was the architect of many buildings of Brasilia born?
In which city was the architect of the Sydney Opera House born?
Which was completed first, the Eiffel Tower or the Brandenburg Gate?
In which year did the author of Don Quixote die?
Where was the author of Frankenstein born?
Which was published first, Don Quixote or Frankenstein?
In which town was the composer of The Magic Flute born?
When did the composer of Fidelio die?
Which opera was performed first, The Magic Flute or Fidelio?
What is the symbol of tungsten?
Which element has the higher atomic number, oxygen or tungsten?
Who died first, Niels Bohr or Lise Meitner?
"""


def passages() -> list[Passage]:
    """The 37 passages."""
    rows = [line.split("|") for line in _PASSAGES.strip().splitlines()]
    return [Passage(f"real-{i}", title, text) for i, (title, text) in enumerate(rows)]


def questions() -> list[Question]:
    """The 25 questions, without answers: no test uses them."""
    return [Question("real", str(i), text, (), "single") for i, text in enumerate(_QUESTIONS.strip().splitlines())]
