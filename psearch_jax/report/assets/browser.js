"use strict";
// The list of rollouts, its filters, and two panes. Only one page of the list is in the document, and a block of texts
// is unpacked when one of its rollouts is opened, so ten thousand rollouts cost no more than fifty.

const PAGE = 50;
const BLOCKS_KEPT = 8;

class Browser {
  constructor(index, runs) {
    Object.assign(this, { columns: index.columns, questions: index.questions, runs });
    this.several = runs.length > 1;
    this.list = document.getElementById("list");
    this.blocks = new Map();
    this.asked = { left: 0, right: 0 }; // latest request per pane; results of older requests are dropped
    this.from = 0;
    this.chosen = 0; // index in the filtered list
    const form = document.getElementById("filters");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => this.filter());
    form.addEventListener("reset", () => setTimeout(() => this.filter()));
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("click", (event) => {
      const row = event.target.closest("li");
      if (row) this.choose(Number(row.dataset.place));
    });
    document.getElementById("previous").addEventListener("click", () => this.choose(this.from - PAGE));
    document.getElementById("next").addEventListener("click", () => this.choose(this.from + PAGE));
    this.filter();
  }

  filter() {
    const { columns, questions } = this;
    const wanted = [...document.querySelectorAll("#filters select[data-column]")].filter((select) => select.value);
    const words = document.getElementById("words").value.trim().toLowerCase();
    const bound = (id, otherwise) => {
      const input = document.getElementById(id);
      return input && input.value !== "" ? Number(input.value) : otherwise;
    };
    const [first, last] = [bound("from", -Infinity), bound("to", Infinity)];
    const matching = words ? questions.map((question) => question.text.toLowerCase().includes(words)) : null;
    this.rows = columns.run.map((_, row) => row).filter((row) =>
      wanted.every((select) => String(columns[select.dataset.column][row]) === select.value) &&
      (!matching || matching[columns.question[row]]) &&
      (columns.step[row] === null || (columns.step[row] >= first && columns.step[row] <= last)));
    const order = document.getElementById("order").value;
    const by = (column) => (a, b) => (columns[column][a] ?? 0) - (columns[column][b] ?? 0);
    const score = columns.reward.some((value) => value !== null) ? by("reward") : by("correct");
    const recorded = (a, b) => by("step")(a, b) || by("run")(a, b) || a - b;
    const orders = {
      step: recorded,
      reward: (a, b) => score(a, b) || recorded(a, b),
      question: (a, b) => by("question")(a, b) || recorded(a, b),
    };
    this.rows.sort(orders[order]);
    const correct = this.rows.filter((row) => columns.correct[row]).length;
    const share = this.rows.length ? `, ${(100 * correct / this.rows.length).toFixed(1)}% correct` : "";
    document.getElementById("count").textContent = `${this.rows.length} of ${columns.run.length} rollouts${share}`;
    this.choose(0);
  }

  key(event) {
    const last = this.rows.length - 1;
    const to = {
      ArrowDown: this.chosen + 1, ArrowUp: this.chosen - 1, PageDown: this.chosen + PAGE, PageUp: this.chosen - PAGE,
      Home: 0, End: last,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.choose(to);
  }

  choose(place) {
    this.chosen = Math.max(0, Math.min(place, this.rows.length - 1));
    this.from = Math.floor(this.chosen / PAGE) * PAGE;
    const shown = this.rows.slice(this.from, this.from + PAGE);
    this.list.replaceChildren(...shown.map((row, at) => this.entry(row, this.from + at)));
    const one = this.list.children[this.chosen - this.from];
    if (one) {
      this.list.setAttribute("aria-activedescendant", one.id);
      // scrollIntoView would also scroll the page.
      const below = one.offsetTop + one.offsetHeight - this.list.offsetTop - this.list.clientHeight;
      const above = one.offsetTop - this.list.offsetTop;
      this.list.scrollTop = Math.max(below, Math.min(this.list.scrollTop, above));
    } else {
      this.list.removeAttribute("aria-activedescendant");
    }
    const pages = Math.max(1, Math.ceil(this.rows.length / PAGE));
    document.getElementById("page").textContent = `page ${this.from / PAGE + 1} of ${pages}`;
    document.getElementById("previous").disabled = this.from === 0;
    document.getElementById("next").disabled = this.from + PAGE >= this.rows.length;
    this.show("left", one ? this.rows[this.chosen] : null);
    this.show("right", null);
  }

  entry(row, place) {
    const { columns } = this;
    const selected = place === this.chosen;
    const facts = [columns.kind[row], columns.split[row].replaceAll("_", " "), columns.benchmark[row] || null];
    if (columns.status[row] !== "answered") facts.push(columns.status[row].replaceAll("_", " "));
    return element(
      "li",
      { role: "option", id: `row-${place}`, "data-place": place, "aria-selected": selected },
      this.questions[columns.question[row]].text,
      element("span", { class: "facts" }, this.outcome(row), ` ${[this.where(row), ...facts].filter(Boolean).join(", ")}`),
    );
  }

  outcome(row) {
    const correct = this.columns.correct[row];
    const reward = this.columns.reward[row];
    const text = (correct ? "correct" : "incorrect") + (reward === null ? "" : `, reward ${reward.toFixed(2)}`);
    return element("span", { class: correct ? "correct" : "incorrect" }, text);
  }

  /** The run, step and sample of a rollout. */
  where(row) {
    const { columns } = this;
    const parts = [this.several ? this.runs[columns.run[row]].name : null];
    if (columns.step[row] !== null) parts.push(`step ${columns.step[row]}`);
    parts.push(`sample ${columns.sample[row]}`);
    return parts.filter(Boolean).join(", ");
  }

  async body(row) {
    const number = this.columns.block[row];
    if (!this.blocks.has(number)) {
      if (this.blocks.size >= BLOCKS_KEPT) this.blocks.delete(this.blocks.keys().next().value);
      this.blocks.set(number, unpacked(`block-${number}`));
    }
    return (await this.blocks.get(number))[this.columns.place[row]];
  }

  async show(side, row) {
    const pane = document.getElementById(side);
    const mine = ++this.asked[side];
    if (side === "right") pane.hidden = row === null;
    if (row === null) {
      pane.replaceChildren();
      return;
    }
    const body = await this.body(row);
    if (mine !== this.asked[side]) return;
    const facts = [this.where(row), this.columns.kind[row], this.columns.status[row].replaceAll("_", " ")];
    const head = [
      element("h3", {}, this.questions[this.columns.question[row]].text),
      element("p", { class: "facts" }, this.outcome(row), ` ${facts.join(", ")}`),
    ];
    if (side === "left") head.push(...this.companions(row));
    pane.dataset.row = row;
    pane.replaceChildren(...head, ...rolloutBody(body));
  }

  /** A menu of the question's other rollouts, those of other steps and runs first. */
  companions(row) {
    const { columns } = this;
    const others = columns.question.map((_, other) => other)
      .filter((other) => other !== row && columns.question[other] === columns.question[row]);
    if (!others.length) return [];
    const same = (other) => columns.step[other] === columns.step[row] && columns.run[other] === columns.run[row];
    others.sort((a, b) => same(a) - same(b) || columns.step[a] - columns.step[b] || a - b);
    const choice = element("select", {}, element("option", { value: "" }, "none"));
    for (const other of others) {
      const outcome = columns.correct[other] ? "correct" : "incorrect";
      choice.append(element("option", { value: other }, `${this.where(other)}, ${outcome}`));
    }
    choice.addEventListener("change", () => this.show("right", choice.value === "" ? null : Number(choice.value)));
    return [element("p", { class: "controls" }, element("label", {}, "Compare with", choice))];
  }
}

(async () => {
  if (!document.getElementById("list")) return;
  const [index, data] = await Promise.all([unpacked("index"), unpacked("data")]);
  new Browser(index, data.runs);
  document.documentElement.dataset.browser = "ready";
})();
