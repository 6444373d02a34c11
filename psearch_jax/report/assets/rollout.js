"use strict";
// Renders one rollout: the turns with coloured tags and a log-prob for every token, sub-queries with their passages,
// and the parts of the reward.

const REGION = /<(think|search|information|answer)>[\s\S]*?(?:<\/\1>|$)/g;
const DOTTED_BELOW = -0.1; // nats, a probability of .90
const SOLID_BELOW = -0.7; // nats, a probability of .50

/** [start, end, tag] of every region of a text; tag is "" outside of tags. */
function regions(text) {
  const spans = [];
  let at = 0;
  for (const match of text.matchAll(REGION)) {
    if (match.index > at) spans.push([at, match.index, ""]);
    at = match.index + match[0].length;
    spans.push([match.index, at, match[1]]);
  }
  if (at < text.length) spans.push([at, text.length, ""]);
  return spans;
}

function describeLogprob(logprob) {
  if (logprob === null) return "log-prob not finite";
  const probability = Math.exp(logprob);
  return `log-prob ${logprob.toFixed(4)}, probability ${probability >= 0.9995 ? "1.000" : probability.toPrecision(3)}`;
}

/** The sampled text of a turn. If tokens are known, each is a span with its log-prob; arrow keys move between them. */
function sampledText(turn) {
  const text = turn.pieces ? turn.pieces.join("") : turn.text;
  const box = element("div", { class: "sampled" });
  let id = 0;
  let begin = 0; // start of the token's text
  for (const [start, end, tag] of regions(text)) {
    const region = tag ? element("span", { class: `tag ${tag}` }) : box;
    if (tag) box.append(region);
    if (!turn.pieces) {
      region.append(text.slice(start, end));
      continue;
    }
    while (id < turn.pieces.length) {
      const stop = begin + turn.pieces[id].length;
      const part = text.slice(Math.max(start, begin), Math.min(end, stop));
      if (part) {
        const logprob = turn.logprobs[id];
        const underline = logprob === null || logprob < SOLID_BELOW ? "unlikely" : logprob < DOTTED_BELOW ? "less-likely" : null;
        region.append(element("span", { "data-at": id, class: underline }, part));
      }
      if (stop > end) break; // the rest of this token belongs to the next region
      begin = stop;
      id += 1;
    }
  }
  if (turn.pieces) hoverable(box, turn);
  return box;
}

function hoverable(box, turn) {
  const tip = document.getElementById("tip");
  let now = null;
  const show = (span) => {
    if (now) now.classList.remove("here");
    now = span;
    tip.hidden = !span;
    if (!span) return;
    const at = Number(span.dataset.at);
    tip.textContent = `${JSON.stringify(turn.pieces[at])} (token ${turn.ids[at]}): ${describeLogprob(turn.logprobs[at])}`;
    const place = span.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${place.top > 40 ? place.top - tip.offsetHeight - 4 : place.bottom + 4}px`;
  };
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Sampled text: move between tokens with the arrow keys to see their log-probs");
  box.addEventListener("pointerover", (event) => show(event.target.closest("[data-at]")));
  box.addEventListener("pointerleave", () => show(null));
  box.addEventListener("blur", () => show(null));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") show(null);
    if (!step) return;
    event.preventDefault();
    const spans = [...box.querySelectorAll("[data-at]")];
    const next = spans[now ? Math.max(0, Math.min(spans.indexOf(now) + step, spans.length - 1)) : 0];
    show(next);
    if (next) next.classList.add("here");
  });
}

function passages(ranking) {
  const box = element("div", { class: "passages" });
  for (const [title, id, text] of ranking) {
    const shown = text === null ? title || "" : text;
    box.append(element("p", {}, shown, " ", element("span", { class: "id" }, text === null && title ? id : `[${id}]`)));
  }
  if (!ranking.length) box.append(element("p", {}, "no passages"));
  return box;
}

function rewardTable(parts) {
  const head = element("tr");
  const row = element("tr");
  for (const [name, value] of Object.entries(parts)) {
    head.append(element("th", { scope: "col" }, name.replaceAll("_", " ")));
    row.append(element("td", {}, value.toFixed(3)));
  }
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, row)));
}

/** All of a rollout below its heading. */
function rolloutBody(body) {
  const parts = [element("p", { class: "facts" }, `Gold answers: ${body.gold.join(" | ")}`)];
  if (Object.keys(body.reward).length) parts.push(rewardTable(body.reward));
  if (body.prompt) {
    parts.push(element("details", {}, element("summary", {}, "Prompt"), element("pre", {}, body.prompt)));
  }
  body.turns.forEach((turn, number) => {
    const box = element("div", { class: "turn", "aria-label": `Turn ${number + 1}`, role: "group" });
    if (turn.text || turn.pieces) box.append(sampledText(turn));
    for (const [query, ranking] of turn.searches || []) {
      box.append(element("div", { class: "search-result" }, element("div", { class: "query" }, query), passages(ranking)));
    }
    if (turn.forced) box.append(element("pre", {}, turn.forced));
    parts.push(box);
  });
  return parts;
}
