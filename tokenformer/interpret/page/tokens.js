"use strict";

/* All tokens: search, sort, and a list that only draws the rows in view. */
const COLUMNS = [
  ["work", "work", "share of the layer's work; 1 is the average token"],
  ["frequency", "fires", "share of the positions at which it fires"],
  ["largest", "peak", "largest weight"],
  ["selectivity", "selective", "0: the same weight everywhere; close to 1: a large weight at few positions"],
];
const ALL = "all layers";
const TALLEST = 8e6; // pixels that browsers can scroll

/* `scrolled` is where the list was when the reader left it. */
function tokens(query, scrolled) {
  const site = TF.site;
  const total = site.layers.reduce((sum, layer) => sum + layer.tokens, 0);
  const state = {
    layer: query.get("layer") || (total > 200000 ? site.layers[0].name : ALL),
    text: query.get("q") || "",
    age: query.get("age") || "",
    sort: query.get("sort") || "selectivity",
    up: query.get("up") === "1",
  };
  if (state.layer !== ALL && !TF.layer(state.layer)) return notFound(`There is no layer ${state.layer}.`);
  if (!COLUMNS.some(([key]) => key === state.sort)) return notFound(`There is no column ${state.sort}.`);
  const status = el("p", { class: "hint", role: "status" });
  const search = el("input", { type: "search", placeholder: site.image ? "Search class or 2.ffn.8" : "Search text, promoted words, or 2.ffn.8", "aria-label": "Search tokens", value: state.text, id: "search" });
  const select = el("select", { "aria-label": "Layer" }, [ALL, ...site.layers.map((layer) => layer.name)].map((name) =>
    el("option", { value: name, selected: name === state.layer }, name === ALL ? name : `${name} (${layerTitle(name)})`)));
  const age = site.ages.length > 1 ? el("select", { "aria-label": "Age" },
    el("option", { value: "" }, "all ages"), site.ages.map((a) => el("option", { value: a, selected: String(a) === state.age }, ageName(a)))) : null;
  const heads = COLUMNS.map(([key, title, help]) => el("button", { type: "button", title: help, "data-key": key, onclick: () => sortBy(key) }, title));
  const list = virtualList((row, i) => drawToken(row, i), (row) => { location.hash = link(row.layer, row.n); }, () => search.focus());
  const none = el("p", { class: "none", hidden: true }, "No token matches. ",
    el("button", { type: "button", class: "remove", onclick: () => showAll() }, "Show all"));
  const head = el("div", { class: "head" }, el("span", { class: "name" }, "token"), el("span", { class: "what" }, "fires at, promotes"), ...heads);

  async function refresh() {
    const names = state.layer === ALL ? site.layers.map((layer) => layer.name) : [state.layer];
    if (!names.every((name) => TF.pieces.has(`table-${name}`))) status.textContent = "Loading";
    const tables = await Promise.all(names.map((name) => TF.load(`table-${name}`)));
    const wanted = state.text.trim().toLowerCase();
    const rows = [];
    tables.forEach((table, t) => {
      const texts = haystacks(names[t], table);
      for (let n = 0; n < texts.length; n++) {
        const matches = (!wanted || texts[n].includes(wanted)) && (!state.age || String(table.age[n]) === state.age);
        if (matches) rows.push({ layer: names[t], n, table, value: table[state.sort][n] });
      }
    });
    rows.sort((a, b) => (state.up ? a.value - b.value : b.value - a.value));
    status.textContent = rows.length === 1 ? "1 token" : `${count(rows.length)} tokens`;
    for (const button of heads) {
      const on = button.dataset.key === state.sort;
      button.setAttribute("aria-pressed", on);
      button.dataset.direction = on ? (state.up ? "up" : "down") : "";
    }
    none.hidden = rows.length > 0;
    list.element.hidden = !rows.length;
    list.show(rows, scrolled);
    scrolled = 0;
    remember();
  }

  function showAll() {
    state.text = search.value = state.age = "";
    if (age) age.value = "";
    search.focus();
    refresh();
  }

  function sortBy(key) {
    if (state.sort === key) state.up = !state.up; else { state.sort = key; state.up = false; }
    refresh();
  }

  function remember() {
    const parts = new URLSearchParams();
    if (state.layer !== ALL) parts.set("layer", state.layer);
    if (state.text) parts.set("q", state.text);
    if (state.age) parts.set("age", state.age);
    if (state.sort !== "selectivity") parts.set("sort", state.sort);
    if (state.up) parts.set("up", "1");
    const tail = parts.toString();
    history.replaceState(history.state, "", tail ? `#/tokens?${tail}` : "#/tokens");
  }

  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.text = search.value; refresh(); }, 120);
  });
  search.addEventListener("keydown", (event) => {
    const found = search.value.trim().match(/^(\d+\.\w+)\.(\d+)$/);
    if (event.key === "Enter" && found && TF.hasToken(found[1], found[2])) location.hash = link(found[1], found[2]);
    else if (event.key === "Enter" || event.key === "ArrowDown") { event.preventDefault(); list.enter(); }
  });
  select.addEventListener("change", () => { state.layer = select.value; refresh(); });
  age?.addEventListener("change", () => { state.age = age.value; refresh(); });
  const page = el("div", { class: "tokens" }, el("h1", {}, "Tokens"),
    el("div", { class: "tools" }, search, select, age || "", status), el("div", { class: "table" }, head, list.element, none));
  refresh().catch(showError);
  return page;
}

function haystacks(layer, table) {
  table.texts ||= table.words.map((words, n) => `${layer}.${n} ${words.join(" ")} ${table.snippets[n].join("")}`.toLowerCase());
  Object.defineProperty(table, "texts", { enumerable: false });
  return table.texts;
}

/* Where a token fires most, in short. */
function place(table, n) {
  return table.tops ? thumbnail(table.tops[n]) : snippet(table.snippets[n]);
}

function drawToken(row, i) {
  const { layer, n, table } = row;
  return el("a", { class: "row", href: link(layer, n), role: "option", tabindex: "-1", id: `row-${i}` },
    el("span", { class: "name" }, ageDot(table.age[n]), `${layer}.${n}`),
    el("span", { class: "what" }, place(table, n), table.words[n].length ? chips(table.words[n]) : null),
    COLUMNS.map(([key, title]) => {
      const value = table[key][n];
      const shown = { frequency: percent, work: times }[key]?.(value) ?? number(value);
      return el("span", { class: `number ${key}` }, el("span", { class: "label" }, title), el("span", {}, shown),
        key === "frequency" || key === "selectivity" ? meter(value, shown) : null);
    }));
}

/* A list of any length: `draw(row, i)` makes a row, `open(row)` is called for Enter, `leave()` for
   the arrow up from the first row. */
function virtualList(draw, open, leave) {
  const sizer = el("div", { class: "sizer" });
  const element = el("div", { class: "rows", tabindex: "0", role: "listbox", "aria-label": "Tokens" }, sizer);
  const drawn = new Map(); // elements of the rows in view, by number
  let rows = [], active = -1, frame = 0;
  const height = () => parseFloat(getComputedStyle(element).getPropertyValue("--row")) || 44;
  const tall = () => Math.min(TALLEST, rows.length * height());
  /* Beyond TALLEST the scroll position is stretched. */
  const stretch = () => {
    const room = tall() - element.clientHeight;
    return room > 0 ? (rows.length * height() - element.clientHeight) / room : 1;
  };

  function render() {
    frame = 0;
    const h = height(), stretched = stretch(), top = element.scrollTop * stretched;
    const first = Math.max(0, Math.floor(top / h) - 6);
    const last = Math.min(rows.length, Math.ceil((top + element.clientHeight) / h) + 6);
    for (const [i, row] of drawn) {
      if (i >= first && i < last) continue;
      row.remove();
      drawn.delete(i);
    }
    for (let i = first; i < last; i++) {
      if (!drawn.has(i)) drawn.set(i, insert(i));
      const row = drawn.get(i), selected = String(i === active);
      const moved = `translateY(${i * h + (stretched === 1 ? 0 : element.scrollTop - top)}px)`;
      if (row.style.transform !== moved) row.style.transform = moved;
      if (row.getAttribute("aria-selected") !== selected) row.setAttribute("aria-selected", selected);
    }
    if (drawn.has(active)) element.setAttribute("aria-activedescendant", `row-${active}`);
    else element.removeAttribute("aria-activedescendant");
  }

  function insert(i) {
    const row = draw(rows[i], i);
    row.setAttribute("aria-setsize", rows.length);
    row.setAttribute("aria-posinset", i + 1);
    const next = [...drawn.keys()].filter((other) => other > i);
    sizer.insertBefore(row, next.length ? drawn.get(Math.min(...next)) : null);
    return row;
  }

  const later = () => { frame ||= requestAnimationFrame(render); };

  function moveTo(i) {
    active = Math.max(0, Math.min(rows.length - 1, i));
    const h = height(), top = element.scrollTop * stretch();
    if (active * h < top) element.scrollTop = (active * h) / stretch();
    else if ((active + 1) * h > top + element.clientHeight) element.scrollTop = ((active + 1) * h - element.clientHeight) / stretch();
    render();
  }

  element.addEventListener("scroll", later);
  new ResizeObserver(later).observe(element);
  element.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(element.clientHeight / height()) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    if (event.key === "ArrowUp" && active <= 0) leave();
    else if (event.key in steps) moveTo(active + steps[event.key]);
    else if (event.key === "Home") moveTo(0);
    else if (event.key === "End") moveTo(rows.length - 1);
    else if (event.key === "Enter" && rows[active]) open(rows[active]);
    else return;
    event.preventDefault();
  });
  return {
    element,
    show(found, scrolled = 0) {
      [rows, active] = [found, -1];
      drawn.clear();
      sizer.replaceChildren();
      sizer.style.height = `${tall()}px`;
      element.scrollTop = scrolled;
      render();
    },
    enter() {
      if (!rows.length) return;
      element.focus();
      moveTo(Math.max(0, active));
    },
  };
}
