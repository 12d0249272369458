// Keys, folding, local time, raw JSON in place, and live updates. No library; the page works without this, only less conveniently.
"use strict";
const rows = () => [...document.querySelectorAll("tr[data-href], article.step")];
function move(by, wanted = () => true) {
  const every = rows();
  const all = every.filter(wanted);
  if (!all.length) return;
  const here = every.indexOf(document.activeElement);
  const ahead = by > 0 ? all.find((row) => every.indexOf(row) > here) : all.findLast((row) => here < 0 || every.indexOf(row) < here);
  const next = ahead || (by > 0 ? all[all.length - 1] : all[0]);
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}
function follow_link(selector) {
  const link = document.querySelector(selector);
  if (link) location.href = link.href;
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const here = event.target;
  if (event.key === "Escape") { here.blur(); return; }
  if (/^(INPUT|TEXTAREA|SELECT)$/.test(here.tagName) || document.querySelector("dialog[open]")) return;
  if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "f") move(1, (row) => row.dataset.failed);
  else if (event.key === "Enter" && here.dataset && here.dataset.href) location.href = here.dataset.href;
  else if (event.key === "u") follow_link("a[rel=up]");
  else if (event.key === "n") follow_link("a[rel=next]");
  else if (event.key === "p") follow_link("a[rel=prev]");
  else if (event.key === "[") follow_link("a[rel=prev-attempt]");
  else if (event.key === "]") follow_link("a[rel=next-attempt]");
  else if (event.key === "o") follow_link("a[rel=other-agent]");
  else if (event.key === "?") document.getElementById("keys").showModal();
  else if (/^[1-5]$/.test(event.key)) { const button = document.querySelectorAll("[data-fold]")[event.key - 1]; if (button) button.click(); }
  else if (event.key === "/") { const search = document.querySelector("input[type=search]"); if (!search) follow_link("header a[href$='/search']"); if (search) search.focus(); }
  else return;
  event.preventDefault();
});
document.addEventListener("dblclick", (event) => {
  const row = event.target.closest("tr[data-href]");
  if (row) location.href = row.dataset.href;
});
// moments are sent in UTC and shown in the reader's own time zone
function show_local_times() {
  const pad = (number) => String(number).padStart(2, "0");
  for (const shown of document.querySelectorAll("time[datetime]:not([title])")) {
    const at = new Date(shown.dateTime);
    shown.title = shown.textContent;
    shown.textContent = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  }
}
// what is folded by kind stays so from page to page
const folds = () => { try { return JSON.parse(localStorage.getItem("folds")) || {}; } catch (problem) { return {}; } };
const parts_of = (kind) => [...document.querySelectorAll(`details[data-kind="${kind}"]`)];
function show_folds() {
  const kept = folds();
  for (const button of document.querySelectorAll("[data-fold]")) {
    const parts = parts_of(button.dataset.fold);
    if (button.dataset.fold in kept) parts.forEach((part) => { part.open = kept[button.dataset.fold]; });
    button.setAttribute("aria-pressed", String(parts.some((part) => part.open)));
    button.disabled = !parts.length;
  }
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-fold]");
  if (!button) return;
  const open = button.getAttribute("aria-pressed") !== "true";
  try { localStorage.setItem("folds", JSON.stringify({ ...folds(), [button.dataset.fold]: open })); } catch (problem) { /* kept for this page alone */ }
  parts_of(button.dataset.fold).forEach((part) => { part.open = open; });
  button.setAttribute("aria-pressed", String(open));
});
document.getElementById("show-keys").addEventListener("click", () => document.getElementById("keys").showModal());
show_local_times();
show_folds();
// "raw JSON" opens under its step and closes again; with a modifier key it is an ordinary link
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-raw]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const step = link.closest("article");
  const open = step.querySelector("pre.json");
  if (open) { open.remove(); link.textContent = "raw JSON"; return; }
  const shown = document.createElement("pre");
  shown.className = "json";
  const answer = await fetch(link.href);
  shown.textContent = answer.ok ? await answer.text() : "not found";
  step.append(shown);
  link.textContent = "hide raw JSON";
});
// live: ask for the newest event's number; when it moves, put the fresh page's content in place
async function follow(url) {
  let seq = null, stale = false;
  for (;;) {
    try {
      const answer = await fetch(url + (seq === null ? "" : "&after=" + seq));
      if (answer.ok) {
        const news = await answer.json();
        stale = stale || (seq !== null && news.seq !== seq) || news.finished;
        seq = news.seq;
        if (stale && !busy()) { await redraw(); stale = false; }
        if (news.finished && !stale) return;
        if (!document.body.dataset.live) return;
      }
    } catch (problem) { /* the server is away; ask again */ }
    await new Promise((done) => setTimeout(done, 1000));
  }
}
// somebody types, or has selected text: what they look at is left alone
const busy = () => /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName) || !getSelection().isCollapsed;
async function redraw() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const focused = document.activeElement.dataset ? document.activeElement.dataset.href : null;
  const open = [...document.querySelectorAll("main details")].map((part) => part.open);
  document.querySelector("main").replaceWith(fresh.querySelector("main"));
  document.title = fresh.title;
  document.querySelectorAll("main details").forEach((part, index) => { if (index < open.length) part.open = open[index]; });
  show_local_times();
  show_folds();
  if (!fresh.body.dataset.live || fresh.body.dataset.finished === "1") delete document.body.dataset.live;
  if (focused) { const row = document.querySelector(`tr[data-href="${CSS.escape(focused)}"]`); if (row) row.focus(); }
}
if (document.body.dataset.live && document.body.dataset.finished === "0") follow(document.body.dataset.live);
