"use strict";

/* Elements, numbers, bars, highlighted text and pictures. Text from data is only ever set as text. */
const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) element.style.setProperty(key, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const count = (n) => n.toLocaleString("en");
const percent = (x) => (x === 0 ? "0 %" : x < 0.0005 ? "<0.1 %" : `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)} %`);
const number = (x) => (Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(1) : x.toFixed(2));

const times = (x) => `${number(x)} ×`;

function large(n) {
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["K", 1e4]]) {
    if (n >= size) return `${(n / (unit === "K" ? 1e3 : size)).toFixed(n >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return count(n);
}

const PROJECTIONS = { q: "query", k: "key", v: "value", o: "output", ffn: "feed-forward" };

function layerTitle(name) {
  const [block, projection] = name.split(".");
  return `block ${block}, ${PROJECTIONS[projection]}`;
}

const link = (layer, n) => `#/token/${layer}/${n}`;
const ageName = (age) => (age === 0 ? "original" : `growth ${age}`);
const ageColor = (age) => `var(--age-${Math.min(age, 5)})`;

/* Which growth added a token; nothing if the model has not grown. */
function ageDot(age) {
  return TF.site.ages.length < 2 ? null : el("span", { class: "dot", "--color": ageColor(age), title: ageName(age) });
}

function meter(share, label) {
  const width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return el("span", { class: "meter", title: label, "aria-hidden": "true" }, el("span", { "--w": width }));
}

/* White space that would be invisible on its own. */
function visible(text) {
  return text === " " ? "␣" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
}

function chips(words) {
  return el("span", { class: "chips" }, words.map((word) => el("span", { class: "chip" }, visible(word))));
}

/* A text in runs [text, level]; levels from 10 on are of the part that fired. */
function highlighted(runs) {
  return runs.map(([text, level]) => {
    const shown = text.replace(/\n/g, "↵\n");
    if (level >= 10) return el("mark", { class: "fired", "--level": Math.max(4, level - 10) }, shown.replace(/^ $/, "␣"));
    return level ? el("mark", { "--level": level }, shown) : shown;
  });
}

function snippet(parts) {
  if (!parts.length) return null;
  const [before, fired, after] = parts.map((part) => part.replace(/\s+/g, (s) => (s.includes("\n") ? "↵" : " ")));
  return el("span", { class: "snippet" }, el("span", { class: "before" }, el("bdi", {}, before)),
    el("mark", { class: "fired", "--level": 7 }, visible(fired)), el("span", { class: "after" }, after));
}

/* The places in the inputs that weights are of. */
function placesName() {
  return !TF.site.image ? "positions" : TF.site.classTokens ? "patches and class tokens" : "patches";
}

/* Positions of an image are its class token, if the model has one, and its patches row by row. */
const isClassToken = (position) => position < TF.site.classTokens;

function placeName(position) {
  const [, , , , columns] = TF.site.image, patch = position - TF.site.classTokens;
  return patch < 0 ? "class token" : `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
}

/* A picture from base64 bytes [C, H, W]. Given the levels of its positions as digits, patches that a
   token does not fire on are dimmed; where it fires most on the class token, none is. */
function picture(bytes, digits, fired, label) {
  const [channels, height, width, rows, columns] = TF.site.image;
  const data = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
  const canvas = el("canvas", { width, height, "aria-hidden": "true" });
  const pixels = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = data[(channels === 1 ? 0 : c) * width * height + i];
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  const skipped = TF.site.classTokens, levels = [...(digits || "").slice(skipped)];
  const plain = !levels.some(Number) || (fired !== null && isClassToken(fired));
  const cells = Array.from({ length: rows * columns }, (_, i) => el("span", {
    "--level": plain ? null : levels[i], class: i + skipped === fired ? "fired" : null,
  }));
  return el("span", { class: "picture", role: "img", "aria-label": label, "--columns": columns },
    canvas, el("span", { class: plain ? "patches plain" : "patches", "aria-hidden": "true" }, cells));
}

/* The strongest context of a token of an image classifier, loaded when it is drawn. */
function thumbnail(top) {
  if (!top) return null;
  const [row, position, digits] = top;
  const place = el("span", { class: "thumb" }, isClassToken(position) ? el("small", {}, "class token") : null);
  TF.image(row).then((bytes) => place.prepend(picture(bytes, digits, position, `image ${row}, ${placeName(position)}`)), () => {});
  return place;
}

/* A small area chart of values from 0 to 1. */
function spark(values, label) {
  const points = values.map((v, i) => `${(100 * i) / (values.length - 1)},${40 - 38 * v}`).join(" ");
  return svg("svg", { class: "spark", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("polygon", { points: `0,40 ${points} 100,40` }),
    svg("polyline", { points, "vector-effect": "non-scaling-stroke" }));
}

/* Parts [share, age] of a bar. */
function stacked(parts, label) {
  return el("span", { class: "stacked", role: "img", "aria-label": label },
    parts.map(([share, age]) => el("span", { "--w": `${100 * share}%`, "--color": ageColor(age) })));
}

function histogram(counts, threshold) {
  const low = -0.25, step = 0.25, total = counts.reduce((a, b) => a + b, 0) || 1;
  const height = (n) => (n ? 6 + 94 * (1 + Math.log10(n / total) / Math.log10(Math.max(10, total))) : 0);
  const last = Math.max(8, counts.findLastIndex((n) => n > 0) + 1);
  const bars = counts.slice(0, last).map((n, i) => {
    const from = low + i * step;
    const upper = i === counts.length - 1 ? "or more" : `to ${from + step}`;
    const inactive = from < threshold ? "quiet" : null;
    return el("span", { class: inactive, "--h": `${height(n)}%`, title: `weight ${from} ${upper}: ${count(n)} (${percent(n / total)})` });
  });
  const ticks = [0, 1, 2, 3, 4, 5].filter((x) => (x - low) / step < last)
    .map((x) => el("span", { "--x": `${(100 * (x - low)) / step / last}%` }, x));
  const fires = percent(counts.reduce((sum, n, i) => sum + (low + i * step >= threshold ? n : 0), 0) / total);
  return el("div", { class: "histogram", role: "img", "aria-label": `Histogram of the weights. ${fires} of them are at least ${threshold}.` },
    el("div", { class: "bars" }, bars), el("div", { class: "ticks" }, ticks));
}

function card(title, ...children) {
  return el("section", { class: "card" }, el("h2", {}, title), ...children);
}
