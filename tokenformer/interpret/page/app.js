"use strict";

/* Views by the hash of the address, and the theme. */
const main = document.getElementById("main");
const PLACES = new Map(); // where views were scrolled to, by entry of the history
let shown = 0, entry = null, wantsSearch = false;
history.scrollRestoration = "manual"; // views are drawn after the browser would scroll

/* Remembers the place of the view that is left; returns that of the next one if it was seen before. */
function enter() {
  if (entry !== null) PLACES.set(entry, { page: scrollY, list: main.querySelector(".rows")?.scrollTop });
  entry = history.state?.entry ?? null;
  const place = PLACES.get(entry);
  if (entry === null) {
    entry = Date.now();
    history.replaceState({ entry }, "");
  }
  return place;
}

async function route() {
  const place = enter();
  const [path, tail] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...parts] = path.split("/");
  const views = {
    "": () => overview(),
    tokens: () => tokens(new URLSearchParams(tail), place?.list),
    token: () => tokenPage(parts[0], parts[1]),
    examples: () => examples(parts[0]),
    live: () => (TF.live ? livePage() : el("p", { class: "hint" }, "The live view needs `tokenformer explore --serve`.")),
  };
  const mine = ++shown;
  const tab = { "": "overview", token: "tokens" }[view] ?? view;
  for (const anchor of document.querySelectorAll("#tabs a")) {
    if (anchor.dataset.tab === tab) anchor.setAttribute("aria-current", "page"); else anchor.removeAttribute("aria-current");
  }
  try {
    const page = await (Object.hasOwn(views, view) ? views[view]() : notFound("There is no such page."));
    if (mine !== shown) return; // another view was chosen meanwhile
    main.replaceChildren(page);
    const title = page.querySelector?.("h1")?.textContent;
    document.title = `${title ? `${title} · ` : ""}${TF.site.model}`;
    scrollTo(0, place?.page ?? 0);
    if (wantsSearch) document.getElementById("search")?.focus();
    else if (mine > 1) main.focus({ preventScroll: true });
    wantsSearch = false;
  } catch (error) {
    showError(error);
  }
}

function notFound(message) {
  return el("div", {}, el("h1", {}, "Not found"), el("p", { class: "hint" }, `${message} `, el("a", { href: "#/" }, "To the overview")));
}

function showError(error) {
  main.replaceChildren(el("p", { class: "hint", role: "alert" }, String(error.message || error)));
}

const THEMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = SIGNS[theme];
  button.setAttribute("aria-label", `Theme: ${theme}. Change it`);
  button.title = `Theme: ${theme}`;
  button.onclick = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("tokenformer-theme", next); } catch { /* not kept */ }
    setTheme(next);
  };
}

function savedTheme() {
  try {
    const found = localStorage.getItem("tokenformer-theme");
    return THEMES.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}

setTheme(savedTheme());
if (!TF.site) {
  showError(new Error("data/site.js cannot be loaded; is the folder complete?"));
} else {
  document.getElementById("model").textContent = TF.site.model;
  document.querySelector('[data-tab="examples"]').hidden = !TF.site.examples;
  document.querySelector('[data-tab="live"]').hidden = !TF.live;
  addEventListener("hashchange", route);
  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      wantsSearch = !document.getElementById("search");
      if (wantsSearch) location.hash = "#/tokens";
      else document.getElementById("search").focus();
    }
  });
  route();
}
