// Keys, themes, token numbers, and the live tail. Every page works without it.
"use strict";
(() => {
  const root = document.documentElement;
  const LIVE_MS = 5000;
  const at = { row: -1, token: -1 };
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const remember = (key, value) => { try { localStorage.setItem(key, value); } catch { /* a private window */ } };
  const recall = (key) => { try { return localStorage.getItem(key); } catch { return null; } };

  root.dataset.theme = recall("theme") || "auto";
  one("#theme").addEventListener("click", () => {
    root.dataset.theme = { auto: "dark", dark: "light", light: "auto" }[root.dataset.theme];
    remember("theme", root.dataset.theme);
  });
  one("#help").addEventListener("click", () => one("#keys").showModal());

  // What main holds is replaced by what the server makes of the same address now; a hidden tab asks for nothing.
  const live = one("#live");
  let asking = false;
  live.checked = recall("live") === "on";
  live.addEventListener("change", () => { remember("live", live.checked ? "on" : "off"); tail(); });
  async function tail() {
    if (!live.checked || document.hidden || asking || document.activeElement?.closest("form.filter, #tokens")) return;
    asking = true;
    try {
      const answer = await fetch(location.href, { signal: AbortSignal.timeout(30000) });
      if (answer.ok) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        if (fresh && live.checked) { one("main").replaceWith(fresh); mark(); }
      }
    } catch { /* the next turn asks again */ } finally { asking = false; }
  }
  setInterval(tail, LIVE_MS);

  function mark() {
    const rows = all(".rows tbody tr");
    rows.forEach((row, i) => row.classList.toggle("at", i === at.row));
    if (at.row >= 0 && rows[at.row]) rows[at.row].scrollIntoView({ block: "nearest" });
  }
  function move(by) {
    const count = all(".rows tbody tr").length;
    if (count) { at.row = Math.min(count - 1, Math.max(0, at.row + by)); mark(); }
  }

  const told = (token) => {
    all(".tokens .at").forEach((other) => other.classList.remove("at"));
    if (!token) return;
    token.classList.add("at");
    one("#tells").textContent = token.title;
  };
  document.addEventListener("mouseover", (event) => { const token = event.target.closest?.(".tokens .t"); if (token) told(token); });
  function colour(way) {
    const tokens = one("#tokens");
    if (!tokens) return;
    tokens.dataset.by = way;
    all("[data-way]").forEach((link) => link.toggleAttribute("aria-current", link.dataset.way === way));
    history.replaceState(null, "", `?by=${way}`);
  }
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("[data-way]");
    if (link && !event.metaKey && !event.ctrlKey) { event.preventDefault(); colour(link.dataset.way); }
  });

  document.addEventListener("keydown", (event) => {
    if (event.metaKey || event.ctrlKey || event.altKey || event.target.closest?.("input, dialog[open]")) return;
    const tokens = all(".tokens .t");
    if (event.target.id === "tokens" && (event.key === "ArrowRight" || event.key === "ArrowLeft") && tokens.length) {
      at.token = Math.min(tokens.length - 1, Math.max(0, at.token + (event.key === "ArrowRight" ? 1 : -1)));
      told(tokens[at.token]);
      event.preventDefault();
      return;
    }
    const page = one(`nav [data-key="${CSS.escape(event.key)}"]`);
    if (page) { page.click(); return; }
    const acts = {
      j: () => move(1), k: () => move(-1),
      n: () => one("[rel=next]")?.click(), p: () => one("[rel=prev]")?.click(),
      Enter: () => { if (event.target === document.body) one(".rows tr.at .open")?.click(); },
      "/": () => { one(".filter input")?.focus(); event.preventDefault(); },
      l: () => live.click(), "?": () => one("#keys").showModal(),
      c: () => { const ways = all("[data-way]").map((link) => link.dataset.way); if (ways.length) colour(ways[(ways.indexOf(one("#tokens").dataset.by) + 1) % ways.length]); },
    };
    acts[event.key]?.();
  });
})();
