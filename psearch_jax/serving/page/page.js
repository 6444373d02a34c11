"use strict";
// Model output and passages are only ever set as textContent, so they cannot inject markup.

const at = (id) => document.getElementById(id);
let running = null; // the AbortController of the question that is being answered

function add(parent, tag, text = "", name = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  parent.append(element);
  return element;
}

const plural = (n, one, many) => `${n} ${n === 1 ? one : many}`;

async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function show(article, state, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const { delta, finish_reason: reason } = chunk.choices[0];
  const more = chunk.psearch || {};
  if (delta.reasoning_content) {
    state.said ??= add(article, "p", "", "said");
    state.said.textContent += delta.reasoning_content;
  }
  if (more.queries && !reason) {
    state.said = null;
    state.fan = add(article, "ul", "", "fan");
    state.fan.setAttribute("aria-label", `${plural(more.queries.length, "search", "searches")} at once`);
    for (const query of more.queries) add(add(state.fan, "li"), "strong", query);
  }
  if (more.passages && !reason) {
    [...state.fan.children].forEach((item, i) => {
      for (const p of more.passages[i]) add(item, "p", p.title ? `${p.title}: ${p.text}` : p.text);
      if (!more.passages[i].length) add(item, "p", "nothing found");
    });
    add(article, "p", `${more.seconds.toFixed(2)} s`, "facts");
  }
  if (delta.content !== undefined) state.answer = delta.content;
  if (reason) {
    const turns = more.turns.filter((turn) => turn.text);
    const searches = turns.filter((turn) => turn.queries.length);
    const queries = searches.reduce((sum, turn) => sum + turn.queries.length, 0);
    const answered = more.status === "answered";
    add(article, "p", answered ? state.answer : `no answer (${more.status.replaceAll("_", " ")})`, "answer");
    const held = more.turns.flatMap((turn) => turn.passages.flat());
    for (const id of more.found_in) add(article, "p", `mentioned in: ${held.find((p) => p.id === id).text}`, "facts");
    const counted = `${plural(searches.length, "search", "searches")} of ${plural(queries, "query", "queries")}`;
    const took = [plural(turns.length, "turn", "turns"), counted];
    add(article, "p", `${took.join(", ")}, ${more.seconds.toFixed(2)} s`, "facts took");
  }
}

async function ask(question) {
  running = new AbortController();
  at("go").disabled = true;
  at("stop").disabled = false;
  const article = document.createElement("article");
  at("answers").prepend(article);
  add(article, "h2", question);
  try {
    const headers = { "Content-Type": "application/json" };
    if (at("token").value) headers.Authorization = `Bearer ${at("token").value}`;
    const body = { messages: [{ role: "user", content: question }], stream: true };
    body.temperature = Number(at("temperature").value);
    const sent = { method: "POST", headers, body: JSON.stringify(body), signal: running.signal };
    const response = await fetch("/v1/chat/completions", sent);
    if (!response.ok) throw new Error((await response.json()).error.message);
    const state = {};
    for await (const chunk of chunks(response)) show(article, state, chunk);
  } catch (error) {
    add(article, "p", error.name === "AbortError" ? "stopped" : String(error.message), "facts error");
  }
  at("go").disabled = false;
  at("stop").disabled = true;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("go").disabled) ask(at("question").value);
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());

fetch("/page.json").then((response) => response.json()).then((about) => {
  at("model").textContent = about.model;
  at("token-label").hidden = !about.token;
  for (const example of about.examples) {
    const button = add(at("examples"), "button", example);
    button.type = "button";
    button.addEventListener("click", () => {
      at("question").value = example;
      at("question").focus();
    });
  }
});
