// Keeps the page up to date, and draws what the tables say. All that comes from the process is put in as text or as
// numbers, never as HTML: names are others' choice.
"use strict";

const pause = 1000; // ms between two questions; a process looks at itself no more often
const svgNS = "http://www.w3.org/2000/svg";
const kinds = new Set(["live", "free", "limbo", "coming", "waiting", "lost", "room", "index", "granted", "spare", "shard", "next", "moving", "splitting", "done"]);

function html(tag, attrs, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

function svg(tag, attrs, ...children) {
  return fill(document.createElementNS(svgNS, tag), attrs, children);
}

function fill(el, attrs, children) {
  for (const [k, v] of Object.entries(attrs || {})) el.setAttribute(k, v);
  el.append(...children); // strings become text
  return el;
}

const kindClass = (kind) => "kind-" + (kinds.has(kind) ? kind : kind === "to do" ? "room" : "other");

const setAttr = (el, name, value) => {
  if (el.getAttribute(name) !== String(value)) el.setAttribute(name, value);
};

function setText(el, text) {
  if (el.textContent !== text) el.textContent = text;
}

// part keeps a list's element at a place if it is there, and makes it otherwise.
function part(list, i, make) {
  if (!list.children[i]) list.append(make());
  return list.children[i];
}

function cut(list, count) {
  while (list.children.length > count) list.lastElementChild.remove();
}

const width = 1000; // of a bar, whatever it is on the screen

// drawBar has svg show a bar. It changes what is different alone: a browser pays for each change.
function drawBar(el, b) {
  let x = 0;
  let total = 0;
  for (const p of b.parts) total += p.size;
  let i = 0;
  for (const p of b.parts) {
    const w = total > 0 ? p.size / total * width : 0;
    if (w > 0) {
      const rect = part(el, i++, () => svg("rect", { y: 0, height: 10 }, svg("title")));
      setAttr(rect, "x", x);
      setAttr(rect, "width", w);
      setAttr(rect, "class", kindClass(p.kind));
      setText(rect.firstChild, p.text);
    }
    x += w;
  }
  cut(el, i);
  // A screen reader has it all as text; of a long one, how many parts there are.
  const words = b.parts.length > 16 ? b.parts.length + " parts" : b.parts.map((p) => p.text).join(", ");
  setAttr(el, "aria-label", b.label + ": " + words);
}

// setBar has the element at a place of the list show a bar.
function setBar(list, i, b) {
  const li = part(list, i, () => html("li", {}, html("span", { class: "label" }),
    svg("svg", { role: "img", "aria-label": "", viewBox: `0 0 ${width} 10`, preserveAspectRatio: "none" }), html("span", {})));
  const [label, drawn, note] = li.children;
  setText(label, b.label);
  drawBar(drawn, b);
  setText(note, b.note || "");
  setAttr(note, "class", b.bad ? "note bad" : "note");
}

function legend(bars) {
  const used = [...new Set(bars.flatMap((b) => b.parts.map((x) => x.kind)))].filter((k) => k !== "next"); // next is another shard
  return used.map((k) => html("span", {}, svg("svg", { viewBox: "0 0 10 10" }, svg("rect", { width: 10, height: 10, class: kindClass(k) })), k));
}

// setPicture shows a picture of which the bars in changed, by their places, are others than before.
function setPicture(i, p, changed) {
  const at = part(document.getElementById("pictures"), i, () => html("section", { "aria-labelledby": "p" + i }, html("h2", { id: "p" + i }),
    html("p", { class: "legend", "aria-hidden": "true" }), html("ul", { class: "bars" }), html("p", { class: "more" })));
  const [title, kindsUsed, list, more] = at.children;
  setText(title, p.title);
  const used = [...new Set(p.bars.flatMap((b) => b.parts.map((x) => x.kind)))].join();
  if (kindsUsed.dataset.used !== used) {
    kindsUsed.dataset.used = used;
    kindsUsed.replaceChildren(...legend(p.bars));
  }
  cut(list, p.bars.length);
  for (const j of changed) setBar(list, j, p.bars[j]);
  setText(more, p.more ? `and ${p.more} more` : "");
}

const short = (v) => v >= 100 ? String(Math.round(v)) : String(Number(v.toPrecision(3)));

// roundUp gives the least of 1, 2, 5, 10, 20... and their tenths that is not below v: an axis ends there.
function roundUp(v) {
  if (!(v > 0)) return 1;
  const ten = 10 ** Math.floor(Math.log10(v));
  return ([1, 2, 5].find((m) => m * ten >= v) ?? 10) * ten;
}

// lines draws a chart up to the value top: each line is broken where there is no value.
function lines(c, top, width, height) {
  const out = [0, 0.5].map((y) => svg("path", { d: `M0 ${y * height}H${width}`, class: "grid" }));
  c.lines.forEach((l, n) => {
    let run = [];
    const flush = () => {
      if (run.length === 1) run.push(run[0]);
      if (run.length) out.push(svg("polyline", { points: run.join(" "), class: "stroke" + n % 3 }));
      run = [];
    };
    l.values.forEach((v, i) => {
      if (v === null) return flush();
      const x = width * (i + 1) / l.values.length;
      run.push(x.toFixed(1) + "," + (height * (1 - v / top)).toFixed(1));
    });
    flush();
  });
  return out;
}

// axis has the texts of a chart's axis, from one end to the other. Screen readers have them in the chart's name.
const axis = (name, texts) => html("div", { class: name, "aria-hidden": "true" }, ...texts.map((x) => html("span", {}, x)));

function chart(c, i) {
  let most = 0;
  for (const l of c.lines) for (const v of l.values) if (v !== null && v > most) most = v;
  const top = roundUp(most);
  const now = c.lines.map((l) => {
    const v = l.values.length ? l.values[l.values.length - 1] : null;
    return l.name + " " + (v === null ? "-" : short(v) + " " + c.unit);
  });
  const count = Math.max(0, ...c.lines.map((l) => l.values.length));
  const minutes = count * c.every_seconds / 60;
  const over = count ? `of the last ${Math.round(minutes * 10) / 10} minutes` : "none yet";
  const ago = (m) => m >= 1 ? short(m) + " min ago" : m > 0 ? Math.round(m * 60) + " s ago" : "now";
  const legendOf = html("p", { class: "legend" }, ...now.map((text, n) =>
    html("span", {}, svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("path", { d: "M0 5H10", "stroke-width": 3, class: "stroke" + n % 3 })), text)));
  return html("section", { class: "chart", "aria-labelledby": "c" + i }, html("h2", { id: "c" + i }, c.title),
    html("p", { class: "unit", "aria-hidden": "true" }, c.unit), axis("ticks", [top, top / 2, 0].map(short)),
    svg("svg", { role: "img", "aria-label": `${c.title}, ${over}: now ${now.join(", ")}; at most ${short(most)} ${c.unit}`, viewBox: "0 0 600 120", preserveAspectRatio: "none" }, ...lines(c, top, 600, 120)),
    axis("times", [minutes, minutes / 2, 0].map(ago)), legendOf, html("p", { class: "more" }, `${over}; at most ${short(most)} ${c.unit}`));
}

const none = ["none"]; // the row of a table without any

const opened = new Set(); // rows that somebody has opened, by table and first cell

// setRow has the row at a place of a table's body show cells, and leaves alone those that are as they were: what somebody reads or
// has marked stays. Cells beyond the header's are shown when the row is open.
function setRow(body, i, cells, t) {
  const tr = part(body, i, () => html("tr"));
  const shown = Math.min(cells.length, Math.max(t.header.length, 1));
  cut(tr, shown);
  for (let j = 0; j < shown; j++) {
    const td = part(tr, j, () => html("td"));
    if (j === 0) setFirst(td, cells[0], cells.slice(shown), t.title + "\n" + cells[0]);
    else setText(td, cells[j]);
  }
}

function setFirst(td, text, more, key) {
  let at = td.firstElementChild;
  if (!more.length) {
    if (at) at.remove();
    return setText(td, text);
  }
  if (!at) {
    at = html("details", {}, html("summary"), html("ul"));
    td.replaceChildren(at);
  }
  const [head, list] = at.children;
  head.onclick = () => at.open ? opened.delete(key) : opened.add(key); // it turns after this
  setText(head, text);
  cut(list, more.length);
  more.forEach((m, k) => setText(part(list, k, () => html("li")), m));
  if (at.open !== opened.has(key)) at.open = opened.has(key);
}

// amount is the number that a cell shows, in bytes or seconds if it has such a unit; NaN if it shows none.
const units = { "": 1, "%": 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, ns: 1e-9, "µs": 1e-6, ms: 1e-3, s: 1 };
function amount(cell) {
  const m = /^(-?[\d.]+) ?([a-zA-Zµ%]*)$/.exec(cell ?? "");
  return m ? Number(m[1]) * (units[m[2]] ?? NaN) : NaN;
}

// order gives the places of a table's rows as somebody wants them sorted: numbers by size, and behind them text.
function order(rows, by) {
  const all = [...rows.keys()];
  if (!by) return all;
  const sign = by.down ? -1 : 1;
  return all.sort((i, j) => {
    const [a, b] = [rows[i][by.column], rows[j][by.column]];
    const [x, y] = [amount(a), amount(b)];
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
    return sign * (isNaN(x) ? String(a).localeCompare(String(b)) : x - y) || i - j;
  });
}

const sorted = new Map(); // by a table's title: {column, down}

// sortBy sorts a table by a column, the greatest first; then the least first; then as the process has it.
function sortBy(i, column) {
  const t = known?.tables[i];
  if (!t) return;
  const by = sorted.get(t.title);
  if (by?.column !== column) sorted.set(t.title, { column, down: true });
  else if (by.down) by.down = false;
  else sorted.delete(t.title);
  setTable(i, t, t.rows.keys());
}

// setHeader has a button in each head of a column, which sorts by it.
function setHeader(list, i, t) {
  const tr = part(list, 0, () => html("tr"));
  const by = sorted.get(t.title);
  cut(tr, t.header.length);
  t.header.forEach((name, j) => {
    const th = part(tr, j, () => html("th", { scope: "col" }));
    if (!th.firstElementChild) {
      const button = html("button", { type: "button" });
      button.addEventListener("click", () => sortBy(i, j));
      th.replaceChildren(button);
    }
    setText(th.firstElementChild, name);
    setAttr(th, "aria-sort", by?.column !== j ? "none" : by.down ? "descending" : "ascending");
  });
}

// setTable shows a table of which the rows in changed, by their places, are others than before. The region that has the
// keyboard's focus stays in place.
function setTable(i, t, changed) {
  const lead = known.lead;
  const at = part(document.getElementById(i < lead ? "lead" : "tables"), i < lead ? i : i - lead, () => html("section", {}, html("h2", { id: "t" + i }),
    html("div", { class: "scroll", role: "region", "aria-labelledby": "t" + i, tabindex: 0 }, html("table", {}, html("thead"), html("tbody")))));
  setText(at.querySelector("h2"), t.title);
  setHeader(at.querySelector("thead"), i, t);
  const body = at.querySelector("tbody");
  if (t.rows.length) {
    cut(body, t.rows.length);
    const by = sorted.get(t.title);
    if (by) order(t.rows, by).forEach((from, to) => setRow(body, to, t.rows[from], t));
    else for (const j of changed) setRow(body, j, t.rows[j], t);
  } else {
    cut(body, 1);
    setRow(body, 0, none, t);
  }
  let more = at.querySelector(".more");
  if (!more) at.append(more = html("p", { class: "more" }));
  setText(more, t.more ? `and ${t.more} more` : "");
}

// A link leads to an address that the process has put together; nothing but a web page's is taken for one.
function links(all) {
  return all.filter((l) => /^https?:$/.test(URL.parse(l.href)?.protocol)).map((l) =>
    html("li", {}, html("a", { href: l.href, rel: "noreferrer" }, l.role + " " + l.name)));
}

// cutTables leaves count tables: those that lead, and others.
function cutTables(count) {
  cut(document.getElementById("lead"), Math.min(count, known.lead));
  cut(document.getElementById("tables"), Math.max(count - known.lead, 0));
}

let known = null; // what the page shows: the state that the process told of, with all news since

function show(s) {
  known = s;
  document.title = "kvd " + s.role;
  setText(document.getElementById("version"), `Version ${s.version}, up ${s.up}.`);
  showHead(s);
  cut(document.getElementById("pictures"), s.pictures.length);
  s.pictures.forEach((p, i) => setPicture(i, p, p.bars.keys()));
  cutTables(s.tables.length);
  s.tables.forEach((t, i) => setTable(i, t, t.rows.keys()));
}

// showHead shows what comes before pictures and tables, as far as s has it.
function showHead(s) {
  if (s.health) {
    document.getElementById("health").className = s.health.well ? "well" : "trouble";
    document.title = (s.health.well ? "" : "! ") + "kvd " + known.role;
    setText(document.getElementById("health-text"), s.health.text);
    setText(document.getElementById("health-mend"), s.health.mend || "");
  }
  if (s.links) document.getElementById("links").replaceChildren(...links(s.links));
  if (s.charts) document.getElementById("charts").replaceChildren(...s.charts.map(chart));
}

// update takes news in: what of a list has changed, and how long it is now.
function update(n) {
  known.seen = n.seen;
  setText(document.getElementById("version"), `Version ${known.version}, up ${n.up}.`);
  showHead(n);
  const take = (shorten, list, news, rows, set) => {
    list.length = Math.min(list.length, news.count);
    shorten(news.count);
    for (const x of news.changed) {
      const at = list[x.at] ??= { [rows]: [] };
      at.title = x.title;
      at.more = x.more;
      if (x.header) at.header = x.header;
      at[rows].length = Math.min(at[rows].length, x.rows.count);
      for (const r of x.rows.changed) at[rows][r.at] = r.is;
      set(x.at, at, x.rows.changed.map((r) => r.at));
    }
  };
  take((count) => cut(document.getElementById("pictures"), count), known.pictures, n.pictures, "bars", setPicture);
  take(cutTables, known.tables, n.tables, "rows", setTable);
}

let heard = null; // when the process answered last

async function ask() {
  try {
    const seen = known ? known.seen : "";
    const r = await fetch("/state.json?seen=" + encodeURIComponent(seen), { signal: AbortSignal.timeout(10000) });
    if (!r.ok) throw new Error((await r.text()).trim());
    const s = await r.json();
    if (known && s.since === seen) update(s);
    else show(s);
    heard = new Date();
  } catch (err) {
    known = null; // the next answer is to tell all
    document.getElementById("health").className = "trouble";
    setText(document.getElementById("health-text"), `This process does not answer (${err.message}). ` + (heard ? `The page shows its state at ${heard.toLocaleTimeString()}.` : ""));
    setText(document.getElementById("health-mend"), "");
  }
  setTimeout(tick, pause);
}

// tick asks while somebody can see the page, and no more than once at a time.
function tick() {
  if (!document.hidden) return ask();
  document.addEventListener("visibilitychange", tick, { once: true });
}

tick();
