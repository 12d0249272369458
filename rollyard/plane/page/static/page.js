// Keys and live updates. No library; works without it, only less conveniently.
"use strict";
const rows = () => [...document.querySelectorAll("tr[data-href], article.step")];
function move(by, wanted = () => true) {
  const all = rows().filter(wanted);
  if (!all.length) return;
  const at = all.indexOf(document.activeElement);
  const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  const here = document.activeElement;
  if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "f") move(1, (row) => row.dataset.failed);
  else if (event.key === "Enter" && here && here.dataset.href) location.href = here.dataset.href;
  else if (event.key === "u") { const up = document.querySelector("a[rel=up]"); if (up) location.href = up.href; }
  else if (event.key === "n") { const next = document.querySelector("a[rel=next]"); if (next) location.href = next.href; }
  else if (event.key === "p") { const previous = document.querySelector("a[rel=prev]"); if (previous) location.href = previous.href; }
  else if (event.key === "/") { const search = document.querySelector("input[type=search]"); if (search) search.focus(); }
  else return;
  event.preventDefault();
});
document.addEventListener("dblclick", (event) => {
  const row = event.target.closest("tr[data-href]");
  if (row) location.href = row.dataset.href;
});
async function follow(url) {
  let seq = null;
  for (;;) {
    try {
      const answer = await fetch(url + (seq === null ? "" : "&after=" + seq));
      if (answer.ok) {
        const news = await answer.json();
        if (seq !== null && news.seq !== seq) await redraw();
        seq = news.seq;
        if (news.finished) { await redraw(); return; }
      }
    } catch (problem) { /* the server is away; ask again */ }
    await new Promise((done) => setTimeout(done, 1000));
  }
}
async function redraw() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.href : null;
  document.querySelector("main").replaceWith(fresh.querySelector("main"));
  if (focused) { const row = document.querySelector(`tr[data-href="${CSS.escape(focused)}"]`); if (row) row.focus(); }
}
if (document.body.dataset.live && document.body.dataset.finished === "0") follow(document.body.dataset.live);
