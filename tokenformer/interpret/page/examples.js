"use strict";

/* Score maps of a few inputs: a text to walk through, and the strongest tokens of every layer. */
async function examples(which) {
  const site = TF.site;
  if (!site.examples) return el("p", { class: "hint" }, "This site has no examples.");
  const k = Number(which || 0);
  if (!(Number.isInteger(k) && k >= 0 && k < site.examples)) return notFound(`There is no example ${which}.`);
  const example = await TF.load(`example-${k}`);
  const tabs = el("nav", { class: "steps", "aria-label": "Examples" }, Array.from({ length: site.examples }, (_, i) =>
    el("a", { href: `#/examples/${i}`, "aria-current": i === k ? "page" : null }, i + 1)));
  return el("div", { class: "examples" }, el("div", { class: "titles" }, el("h1", {}, "Score map of an example"), tabs), scoreMap(example));
}

/* `view` keeps the chosen position and layer. */
function scoreMap(example, view = {}) {
  const detail = el("div", { class: "detail", role: "status" });
  const walk = TF.site.image ? imageWalk(example, (i) => choose(i)) : textWalk(example.texts, (i) => choose(i));
  const layerNames = example.layers.map(([name]) => name);
  let layer = view.layer || layerNames.findLast((name) => name.endsWith("ffn")) || layerNames[0];
  const maps = el("div", { class: TF.site.image ? "maps images" : "maps" });
  const select = el("select", { "aria-label": "Layer of the map", onchange: () => { layer = view.layer = select.value; drawMaps(); } },
    layerNames.map((name) => el("option", { value: name, selected: name === layer }, `${name} (${layerTitle(name)})`)));

  function choose(i) {
    walk.mark(i);
    view.position = i;
    const rows = example.positions[i];
    const children = [
      el("h3", {}, TF.site.image ? positionName(i) : ["At ", el("mark", { class: "fired", "--level": 6 }, visible(example.texts[i])), ` (position ${i + 1})`]),
      example.next ? el("p", { class: "hint" }, "predicts ", chances(example.next[i]), example.then[i] ? ["– next in the text: ", chances([example.then[i]])] : null) : null,
      example.effects?.[i].length ? el("div", { class: "raises" }, el("p", { class: "hint" }, "Tokens that raise the logit of ", el("span", { class: "chip" }, visible(example.next[i][0][0])), " most, directly:"),
        raised(example.effects[i])) : null,
      el("p", { class: "hint" }, "Tokens with the largest share of their layer's work here:"),
      el("ul", { class: "alike" }, rows.map(([name, n, weight, share]) => el("li", {},
        el("a", { href: link(name, n) }, el("span", { class: "name" }, `${name}.${n}`)), meter(share, percent(share)),
        el("span", { class: "figure", title: "share of the layer's work" }, percent(share)), el("span", { class: "figure", title: "weight" }, number(weight))))),
    ];
    detail.replaceChildren(...children.filter(Boolean));
  }

  function drawMaps() {
    const rows = example.layers.find(([name]) => name === layer)[1];
    maps.replaceChildren(...rows.map(([n, top, digits]) => el("div", { class: "map" },
      el("a", { href: link(layer, n) }, el("span", { class: "name" }, `${layer}.${n}`), el("small", {}, `up to ${number(top)}`)),
      TF.site.image ? [picture(example.image, digits, null, `patches that ${layer}.${n} fires on`), onClassToken(digits)]
        : el("p", { class: "context" }, highlighted(runsOf(example.texts, digits))))));
  }

  drawMaps();
  choose(Math.min(example.positions.length - 1, view.position ?? 12));
  const classes = example.classes ? el("p", { class: "hint" }, "predicted ", chances(example.classes)) : null;
  return el("div", { class: "columns" },
    el("section", { class: "card follow" }, el("h2", {}, TF.site.image ? "Choose a patch" : "Choose a position"), walk.element, classes, detail),
    el("section", { class: "card" }, el("div", { class: "titles" }, el("h2", {}, "Strongest tokens"), select), maps));
}

/* Says so if no patch has a weight as large as the class token. */
function onClassToken(digits) {
  const most = Math.max(...digits);
  return [...digits].findIndex((digit) => Number(digit) === most) < TF.site.classTokens ? el("small", {}, "class token") : null;
}

function chances(rows) {
  return rows.map(([word, p]) => [el("span", { class: "chip" }, visible(word)), ` ${percent(p)} `]);
}

function raised(rows) {
  return el("ul", { class: "alike" }, rows.map(([name, n, effect]) => el("li", {},
    el("a", { href: link(name, n) }, el("span", { class: "name" }, `${name}.${n}`)), meter(effect / rows[0][2], number(effect)),
    el("span", { class: "figure", title: "added to the logit" }, `+${number(effect)}`))));
}

function positionName(i) {
  return isClassToken(i) ? "Class token" : `Patch in ${placeName(i)}`;
}

function runsOf(texts, digits) {
  const runs = [];
  texts.forEach((text, i) => {
    const level = Number(digits[i]), last = runs[runs.length - 1];
    if (last && last[1] === level) last[0] += text; else runs.push([text, level]);
  });
  return runs;
}

/* A text whose positions can be chosen, by pointer or arrow keys. */
function textWalk(texts, choose) {
  let chosen = 0;
  const parts = texts.map((text, i) => el("span", { class: "piece", "data-i": i },
    text === "\n" ? "↵\n" : text));
  const element = el("p", { class: "walk context", tabindex: "0", role: "slider", "aria-label": "Position in the text", "aria-valuemin": 1, "aria-valuemax": texts.length }, parts);
  element.addEventListener("click", (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined) choose(Number(i));
  });
  element.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(texts.length - 1, chosen + by)));
  });
  return {
    element,
    mark(i) {
      parts[chosen]?.classList.remove("chosen");
      chosen = i;
      parts[i]?.classList.add("chosen");
      element.setAttribute("aria-valuenow", i + 1);
      element.setAttribute("aria-valuetext", `${i + 1}: ${texts[i]}`);
    },
  };
}

function imageWalk(example, choose) {
  const [, , , , columns] = TF.site.image, skipped = TF.site.classTokens;
  const shown = picture(example.image, null, null, "image");
  const whole = skipped ? el("button", { type: "button", class: "remove", onclick: () => choose(0) }, "Class token") : null;
  const cells = [...shown.querySelectorAll(".patches span")];
  let chosen = 0;
  shown.classList.add("walk");
  for (const [name, value] of Object.entries({ tabindex: "0", role: "slider", "aria-label": "Patch of the image", "aria-valuemin": 0, "aria-valuemax": example.positions.length - 1 })) shown.setAttribute(name, value);
  cells.forEach((cell, i) => cell.addEventListener("click", () => choose(i + skipped)));
  shown.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(example.positions.length - 1, chosen + by)));
  });
  return {
    element: el("div", { class: "walks" }, shown, whole),
    mark(i) {
      whole?.setAttribute("aria-pressed", isClassToken(i));
      cells[chosen - skipped]?.classList.remove("fired");
      chosen = i;
      cells[i - skipped]?.classList.add("fired");
      shown.setAttribute("aria-valuenow", i);
      shown.setAttribute("aria-valuetext", positionName(i));
    },
  };
}
