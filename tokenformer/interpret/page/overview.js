"use strict";

/* The overview: sizes, the clearest tokens, how work is spread over every layer, old and new tokens. */
function overview() {
  const site = TF.site;
  const tokens = site.layers.reduce((sum, layer) => sum + layer.tokens, 0);
  const dead = site.layers.reduce((sum, layer) => sum + layer.dead, 0);
  const tenth = site.layers.reduce((sum, layer) => sum + layer.tenth * layer.tokens, 0) / tokens;
  const read = site.positions - site.samples * site.classTokens;
  const facts = [
    [large(site.parameters), "parameters"],
    [count(tokens), `parameter tokens in ${site.layers.length} layers`],
    [large(read), site.image ? "patches read" : "positions read"],
    [percent(tenth), "of the work is done by a tenth of the tokens"],
    [percent(dead / tokens), "of the tokens do next to nothing"],
  ];
  return el("div", { class: "overview" },
    el("div", { class: "hero" },
      el("h1", {}, "What every token does"),
      el("p", {}, "Every projection of this model is attention over learned key-value pairs, its parameter tokens. ",
        "A token fires where its key matches the input, and then adds its value."),
      el("p", { class: "hint" }, `Read: ${count(site.samples)} ${site.image ? "images" : "sequences"} of ${site.source}. `,
        `A token fires where its weight is at least ${site.threshold}; its work is |weight| · ‖value‖.`)),
    el("ul", { class: "facts" }, facts.map(([value, label]) => el("li", {}, el("strong", {}, value), el("span", {}, label)))),
    site.clearest.length ? clearest(site) : null,
    grid(site),
    site.ages.length > 1 ? generations(site) : null);
}

function clearest(site) {
  return card("The clearest tokens",
    el("p", { class: "hint" }, site.image ? "Selective tokens, where they fire most, and the classes that their values promote. The patch that a token fires on most has an outline; patches that it does not fire on are dimmed."
      : "Selective tokens whose strongest contexts agree: three of them each. The words after the arrow are what the value promotes."),
    el("ul", { class: "clearest" }, site.clearest.map(([layer, n, snippets, tops, words]) => el("li", {},
      el("a", { href: link(layer, n) }, el("span", { class: "name" }, `${layer}.${n}`),
        el("span", { class: site.image ? "thumbs" : "lines" }, snippets.map(snippet), tops.map(thumbnail)),
        words.length ? el("span", { class: "leads" }, el("span", { "aria-label": "promotes" }, "→ "), chips(words)) : null)))));
}

function grid(site) {
  const blocks = [...new Set(site.layers.map((layer) => layer.name.split(".")[0]))];
  const columns = Object.keys(PROJECTIONS);
  const head = el("tr", {}, el("th", { scope: "col" }, "block"),
    columns.map((p) => el("th", { scope: "col" }, p, el("small", {}, ` ${PROJECTIONS[p]}`))));
  const rows = blocks.map((block) => el("tr", {}, el("th", { scope: "row" }, block), columns.map((p) => {
    const layer = TF.layer(`${block}.${p}`);
    const label = `${layerTitle(layer.name)}: ${count(layer.tokens)} tokens, a tenth of them do ${percent(layer.tenth)} of the work`;
    return el("td", {}, el("a", { href: `#/tokens?layer=${layer.name}`, title: label, "aria-label": label },
      spark(layer.curve, label), el("span", { class: "cell" }, el("span", {}, count(layer.tokens)), el("span", {}, percent(layer.tenth))),
      site.ages.length > 1 ? stacked(layer.ages.map(([age, n]) => [n / layer.tokens, age]), "ages") : null));
  })));
  return card("How the work is spread",
    el("p", { class: "hint" }, "Each curve adds up the work of a layer's tokens, the busiest first: the steeper, the fewer tokens carry it. ",
      "Below, the number of tokens and what the busiest tenth of them do. Choose a layer to see its tokens."),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Layers" }, el("table", { class: "layers" }, el("thead", {}, head), el("tbody", {}, rows))));
}

function generations(site) {
  const titles = ["layer", "tokens", "work", "work of the new", "selectivity", "idle new"];
  const rows = site.layers.filter((layer) => layer.ages.length > 1).map((layer) => {
    const parts = layer.ages.map(([age, n]) => [n / layer.tokens, age]);
    const work = layer.ages.map(([age, , share]) => [share, age]);
    const says = (list) => list.map(([share, age]) => `${ageName(age)} ${percent(share)}`).join(", ");
    const selective = layer.ages.map(([age, , , selectivity]) => el("span", { class: "pairing" }, ageDot(age), number(selectivity)));
    return el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#/tokens?layer=${layer.name}` }, layer.name)),
      el("td", { "data-label": titles[1] }, stacked(parts, says(parts))), el("td", { "data-label": titles[2] }, stacked(work, says(work))),
      el("td", { class: "figure", "data-label": titles[3] }, percent(work.filter(([, age]) => age).reduce((sum, [share]) => sum + share, 0))),
      el("td", { class: "figure", "data-label": titles[4] }, el("span", {}, selective)),
      el("td", { class: "figure", "data-label": titles[5] }, percent(layer.ages.filter(([age]) => age).reduce((sum, row) => sum + row[4], 0)
        / layer.ages.filter(([age]) => age).reduce((sum, row) => sum + row[1], 0))));
  });
  const legend = site.ages.map((age) => el("li", {}, ageDot(age), ageName(age)));
  return card("Old and new tokens",
    el("ul", { class: "legend" }, legend),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Old and new tokens" }, el("table", { class: "ages" }, el("thead", {}, el("tr", {},
      titles.map((t) => el("th", { scope: "col" }, t)))), el("tbody", {}, rows))));
}
