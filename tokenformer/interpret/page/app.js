"use strict";

/* Views by the hash of the address, and the theme. */
const main = document.getElementById("main");
let shown = 0;

async function route() {
  const [path, tail] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...parts] = path.split("/").map(decodeURIComponent);
  const views = {
    "": () => overview(),
    tokens: () => tokens(new URLSearchParams(tail)),
    token: () => tokenPage(parts[0], Number(parts[1])),
    examples: () => examples(parts[0]),
    live: () => (TF.live ? livePage() : el("p", { class: "hint" }, "The live view needs `tokenformer explore --serve`.")),
  };
  const mine = ++shown;
  const tab = { "": "overview", token: "tokens" }[view] ?? view;
  for (const anchor of document.querySelectorAll("#tabs a")) {
    if (anchor.dataset.tab === tab) anchor.setAttribute("aria-current", "page"); else anchor.removeAttribute("aria-current");
  }
  try {
    const page = await (views[view] || (() => el("p", { class: "hint" }, "There is no such page.")))();
    if (mine !== shown) return; // another view was chosen meanwhile
    main.replaceChildren(page);
    const title = page.querySelector?.("h1")?.textContent;
    document.title = `${title ? `${title} · ` : ""}${TF.site.model}`;
    scrollTo(0, 0);
    if (mine > 1) main.focus({ preventScroll: true });
  } catch (error) {
    showError(error);
  }
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
      if (!location.hash.startsWith("#/tokens")) location.hash = "#/tokens";
      setTimeout(() => document.getElementById("search")?.focus(), 60);
    }
  });
  route();
}
