"use strict";

/* The page of one token. */
async function tokenPage(layer, typed) {
  if (!TF.hasToken(layer, typed)) return notFound(`There is no token ${layer}.${typed}.`);
  const n = Number(typed);
  const token = await TF.token(layer, n);
  const site = TF.site;
  const facts = [
    [percent(token.frequency), `of ${placesName()}: fires`, "its weight is at least " + site.threshold],
    [number(token.largest), "largest weight", ""],
    [times(token.work), "an average token's work", "the sum of |weight| · ‖value‖, in this layer"],
    [times(token.norm), "an average share of the norm", "the norm that divides the scores of this layer"],
    [number(token.selectivity), "selectivity", COLUMNS[3][2]],
  ];
  const title = el("h1", {}, `${layer}.${n} `, el("small", {}, layerTitle(layer)));
  const tags = el("p", { class: "tags" },
    site.ages.length > 1 ? el("span", { class: "tag" }, ageDot(token.age), ageName(token.age)) : null,
    token.dead ? el("span", { class: "tag warn" }, "does next to nothing") : null,
    TF.live ? offButton(layer, n) : null);
  const steps = el("nav", { class: "steps", "aria-label": "Neighboring tokens" },
    step(layer, n - 1, "Previous"), el("a", { href: `#/tokens?layer=${layer}` }, `All of ${layer}`), step(layer, n + 1, "Next"));
  return el("article", { class: "token" }, el("div", { class: "titles" }, title, steps), tags,
    el("ul", { class: "facts" }, facts.map(([value, label, help]) => el("li", { title: help || null }, el("strong", {}, value), el("span", {}, label)))),
    el("div", { class: "columns" },
      card("Fires most at", await contexts(token)),
      el("div", { class: "side" },
        token.promoted.length ? lens(token) : null,
        card("Weights", histogram(token.histogram, site.threshold),
          el("p", { class: "hint" }, `Number of ${placesName()} by weight, on a logarithmic scale. Bright bars are where it fires. `,
            `The mean weight is ${number(token.mean)}, the length of the key ${number(token.key)}, of the value ${number(token.value)}.`)),
        card("Similar tokens", el("div", { class: "likes" },
          await alike("by key: they fire at similar inputs", layer, token.likeKey),
          await alike("by value: they add similar outputs", layer, token.likeValue))))));
}

/* Arrow keys go to the token before and after, unless something else has the focus. */
addEventListener("keydown", (event) => {
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const free = [document.body, main].includes(document.activeElement);
  if (rel && free && !event.altKey && !event.ctrlKey && !event.metaKey) main.querySelector(`.token a[rel=${rel}]`)?.click();
});

function step(layer, n, label) {
  const inside = n >= 0 && n < TF.layer(layer).tokens;
  return inside ? el("a", { href: link(layer, n), rel: label === "Next" ? "next" : "prev" }, label) : el("span", { class: "hint" }, label);
}

async function contexts(token) {
  if (!token.contexts.length) return el("p", { class: "hint" }, "No context was kept.");
  const top = token.contexts[0][0] || 1;
  const rows = await Promise.all(token.contexts.map(async ([weight, sample, position, body]) => el("li", {},
    el("span", { class: "weight", title: `weight ${weight}` }, meter(weight / top, ""), number(weight)),
    TF.site.image ? [el("small", { class: "where" }, placeName(position)),
      picture(await TF.image(sample), body, position, `image ${sample}, ${placeName(position)}, weight ${number(weight)}`)]
      : el("p", { class: "context" }, highlighted(body)))));
  return el("ol", { class: TF.site.image ? "contexts images" : "contexts" }, rows);
}

function lens(token) {
  const list = (title, rows, kind) => {
    const most = Math.max(...rows.map(([, score]) => Math.abs(score)), 1e-9);
    return el("div", {}, el("h3", {}, title), el("ul", { class: `lens ${kind}` }, rows.map(([word, score]) => el("li", {},
      el("span", { class: "chip" }, visible(word)), meter(Math.abs(score) / most, number(score)), el("span", { class: "figure" }, number(score))))));
  };
  return card("Its value", el("div", { class: "pair" }, list("promotes", token.promoted.filter(([, score]) => score > 0), "up"),
    list("suppresses", token.suppressed.filter(([, score]) => score < 0), "down")),
    el("p", { class: "hint" }, "What the value adds to each logit through the final norm, up to the norm's scale."));
}

async function alike(title, layer, rows) {
  const table = await TF.load(`table-${layer}`);
  return el("div", {}, el("h3", {}, title), el("ul", { class: "alike" }, rows.map(([n, cosine]) => el("li", {},
    el("a", { href: link(layer, n) }, el("span", { class: "name" }, `${layer}.${n}`), place(table, n)),
    el("span", { class: "figure", title: "cosine similarity" }, number(cosine))))));
}
