"use strict";

/* The live view: a text of your own, tokens to switch off, and what changes. */
const LIVE = { text: null, off: new Set(), request: null, view: {} };

addEventListener("hashchange", () => LIVE.request?.abort());

async function ask(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal,
  }).catch((error) => {
    throw signal.aborted ? error : new Error("The server does not answer; is it still running?");
  });
  const answer = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

function offButton(layer, n) {
  const name = `${layer}.${n}`;
  const button = el("button", { type: "button", class: "off" });
  const draw = () => {
    const off = LIVE.off.has(name);
    button.setAttribute("aria-pressed", off);
    button.textContent = off ? "Switched off" : "Switch off";
    button.setAttribute("aria-label", `${button.textContent} ${name}`);
    button.title = off ? `Switch ${name} on again` : `Switch ${name} off in the live view`;
  };
  button.addEventListener("click", () => {
    if (!LIVE.off.delete(name)) LIVE.off.add(name);
    draw();
    button.dispatchEvent(new CustomEvent("switched", { bubbles: true }));
  });
  draw();
  return button;
}

function livePage() {
  LIVE.text ??= TF.live.text;
  const box = el("textarea", { rows: 3, "aria-label": "Text", spellcheck: "false", maxlength: TF.live.longest });
  box.value = LIVE.text;
  const status = el("p", { class: "hint", role: "status" });
  const offs = el("p", { class: "offs" });
  const result = el("div", {});
  let timer = 0;

  async function run() {
    LIVE.request?.abort();
    const mine = LIVE.request = new AbortController();
    LIVE.text = box.value;
    drawOffs();
    status.classList.remove("warn");
    if (!LIVE.text) { say("Type a text."); return; }
    status.textContent = "Running";
    result.setAttribute("aria-busy", true);
    try {
      const answer = await ask("api/run", { text: LIVE.text, off: [...LIVE.off] }, mine.signal);
      if (mine.signal.aborted) return;
      status.textContent = `${answer.texts.length} positions`;
      result.removeAttribute("aria-busy");
      const focused = document.activeElement?.classList.contains("walk");
      result.replaceChildren(comparison(answer), withButtons(scoreMap(answer, LIVE.view)));
      if (focused) result.querySelector(".walk").focus();
    } catch (error) {
      if (mine.signal.aborted) return; // the text has changed, or another view was chosen
      say(error.message);
      status.classList.add("warn");
    }
  }

  /* Says why there is no result; that of another text would mislead. */
  function say(message) {
    status.textContent = message;
    result.replaceChildren();
    result.removeAttribute("aria-busy");
  }

  function drawOffs() {
    offs.replaceChildren(...(LIVE.off.size ? ["Off: ", ...[...LIVE.off].map((name) => el("button", {
      type: "button", class: "chip remove", "aria-label": `Switch ${name} on`, title: "Switch on",
      onclick: () => { LIVE.off.delete(name); run(); },
    }, `${name} ×`)), el("button", { type: "button", class: "chip remove", onclick: () => { LIVE.off.clear(); run(); } }, "all on")] : []));
  }

  box.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { if (box.isConnected) run(); }, 350); });
  result.addEventListener("switched", run);
  run();
  return el("div", { class: "live" }, el("h1", {}, "Live"),
    el("p", { class: "hint" }, "Type a text and choose a position to see which tokens fire there. Switch tokens off and watch the loss and the continuation."),
    el("section", { class: "card" }, box, el("div", { class: "tools" }, status, offs)), result);
}

/* Adds a switch to every token of the lists and maps. */
function withButtons(map) {
  const add = () => {
    for (const anchor of map.querySelectorAll(".detail a[href^='#/token/'], .map > a[href^='#/token/']")) {
      if (anchor.parentElement.querySelector(".off")) continue;
      const [, , layer, n] = anchor.getAttribute("href").split("/");
      anchor.after(offButton(layer, n));
    }
  };
  add();
  new MutationObserver(add).observe(map, { childList: true, subtree: true });
  return map;
}

function comparison(answer) {
  const head = el("tr", {}, ["", "loss", "bits per token", "continuation"].map((t) => el("th", { scope: "col" }, t)));
  const reference = answer.runs[0];
  const rows = answer.runs.map((run, i) => {
    const change = run.loss === null || i === 0 ? null : run.loss - reference.loss;
    return el("tr", {}, el("th", { scope: "row" }, run.name),
      el("td", { class: "figure", "data-label": "loss" }, run.loss === null ? "–" : run.loss.toFixed(3),
        change === null ? null : el("small", { class: change > 0 ? "worse" : "better" }, ` ${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(3)}`)),
      el("td", { class: "figure", "data-label": "bits per token" }, run.loss === null ? "–" : (run.loss / Math.LN2).toFixed(2)),
      el("td", {}, el("p", { class: "context", "data-run": i }, i === 0 ? run.continuation : differing(reference.continuation, run.continuation))));
  });
  return el("section", { class: "card" }, el("h2", {}, "What changes"),
    el("div", { class: "scroll" }, el("table", { class: "comparison" }, el("thead", {}, head), el("tbody", {}, rows))));
}

/* The part of a continuation from where it differs is marked. */
function differing(before, after) {
  let same = 0;
  while (same < after.length && before[same] === after[same]) same++;
  return same === after.length ? after : [after.slice(0, same), el("mark", { "--level": 5 }, after.slice(same))];
}
