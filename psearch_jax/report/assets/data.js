"use strict";
// Unpacks the page's data: JSON and Plotly's JavaScript are embedded gzipped, in base64.

async function unpackedText(id) {
  const letters = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function unpacked(id) {
  return JSON.parse(await unpackedText(id));
}

/** An element with attributes and children. Strings become text nodes, so passages cannot inject markup. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
