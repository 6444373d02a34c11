"use strict";
// Filters the recorded rollouts and shows one, or two of the same question side by side. Recorded texts only ever
// become text nodes, so that they cannot inject markup.

const FILTERS = ["run", "part", "kind", "correct", "status", "split"];
const byId = (id) => document.getElementById(id);

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

async function unpack() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function label(rollout, names) {
  const reward = rollout.reward.total === undefined ? "" : `, reward ${rollout.reward.total.toFixed(2)}`;
  const where = `${names.length > 1 ? `${names[rollout.run]}, ` : ""}${rollout.part}, sample ${rollout.sample}`;
  return `${where}: ${rollout.correct}${reward}, ${rollout.kind}, ${rollout.split}, ${rollout.status}`;
}

function tokenSpan([text, logprob, id]) {
  if (id < 0) return text; // the text of a turn, without tokens
  const name = logprob === null || logprob < -0.7 ? "unlikely" : logprob < -0.1 ? "less" : "";
  const shown = logprob === null ? "not finite" : logprob.toFixed(4);
  return element("span", { class: name, title: `token ${id}: log-prob ${shown}` }, text);
}

function show(pane, rollout, names) {
  pane.replaceChildren();
  if (!rollout) return;
  const parts = Object.entries(rollout.reward).map(([name, value]) => `${name} ${value.toFixed(3)}`).join(", ");
  pane.append(element("h3", {}, rollout.question), element("p", {}, label(rollout, names)));
  pane.append(element("p", {}, `Gold answers: ${rollout.gold.join(" | ")}. ${parts && `Reward: ${parts}.`}`));
  for (const segment of rollout.segments) {
    if (typeof segment === "string") pane.append(element("pre", { class: "text" }, segment));
    else pane.append(element("pre", { class: "sampled" }, ...segment.map(tokenSpan)));
  }
}

(async () => {
  const { runs, rollouts } = await unpack();
  const form = byId("filters"), list = byId("list");
  for (const column of FILTERS) {
    const values = [...new Set(rollouts.map((rollout) => rollout[column]))];
    if (values.length < 2) continue;
    const options = values.map((value) => element("option", { value }, column === "run" ? runs[value] : value));
    const select = element("select", { name: column }, element("option", { value: "" }, "any"), ...options);
    form.append(element("label", {}, `${column === "part" ? "step or benchmark" : column} `, select, " "));
  }
  form.append(element("label", {}, "question contains ", element("input", { type: "search", name: "words" })));
  form.addEventListener("submit", (event) => event.preventDefault());

  const filter = () => {
    const wanted = [...new FormData(form)].filter(([name, value]) => name !== "words" && value !== "");
    const words = form.elements.words.value.toLowerCase();
    const kept = [...rollouts.keys()].filter((at) =>
      wanted.every(([name, value]) => String(rollouts[at][name]) === value) &&
      rollouts[at].question.toLowerCase().includes(words));
    const correct = kept.filter((at) => rollouts[at].correct === "correct").length;
    byId("count").textContent = `${kept.length} of ${rollouts.length} rollouts, ${correct} correct`;
    list.replaceChildren(...kept.map((at) =>
      element("option", { value: at }, `${label(rollouts[at], runs)} - ${rollouts[at].question}`)));
    list.selectedIndex = 0;
    choose();
  };
  const choose = () => {
    const rollout = rollouts[list.value], left = byId("left");
    show(left, rollout, runs);
    show(byId("right"), null, runs);
    const others = rollouts.filter((other) => rollout && other !== rollout && other.question === rollout.question);
    if (!others.length) return;
    const options = others.map((other, at) => element("option", { value: at }, label(other, runs)));
    const select = element("select", {}, element("option", { value: "" }, "none"), ...options);
    select.addEventListener("change", () => show(byId("right"), others[select.value], runs));
    left.children[1].after(element("p", {}, element("label", {}, "Compare with ", select)));
  };
  form.addEventListener("input", filter);
  list.addEventListener("input", choose);
  filter();
  document.documentElement.dataset.ready = "yes";
})();
