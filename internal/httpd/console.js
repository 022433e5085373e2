// Keeps the page up to date, and draws what the tables say. All that comes from the process is put in as text or as
// numbers, never as HTML: names are others' choice.
"use strict";

const pause = 2000; // ms between two questions
const svgNS = "http://www.w3.org/2000/svg";
const kinds = new Set(["live", "free", "limbo", "coming", "waiting", "lost", "room", "index", "granted", "spare", "shard", "next", "moving", "splitting"]);

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

// put has el show what make makes of data, unless it shows that already: what somebody reads or has marked stays.
function put(el, data, make) {
  const key = JSON.stringify(data);
  if (el.shows === key) return;
  el.shows = key;
  el.replaceChildren(...make(data));
}

function setText(id, text) {
  const el = document.getElementById(id);
  if (el.textContent !== text) el.textContent = text;
}

const kindClass = (kind) => "kind-" + (kinds.has(kind) ? kind : "other");

function bar(b, width) {
  let x = 0;
  let total = 0;
  for (const p of b.parts) total += p.size;
  const rects = [];
  for (const p of b.parts) {
    const w = total > 0 ? p.size / total * width : 0;
    if (w > 0) rects.push(svg("rect", { x, y: 0, width: w, height: 10, class: kindClass(p.kind) }, svg("title", {}, p.text)));
    x += w;
  }
  // A screen reader has it all as text; of a long one, how many parts there are.
  const words = b.parts.length > 16 ? b.parts.length + " parts" : b.parts.map((p) => p.text).join(", ");
  return svg("svg", { role: "img", "aria-label": b.label + ": " + words, viewBox: `0 0 ${width} 10`, preserveAspectRatio: "none" }, ...rects);
}

function picture(p, i) {
  const used = [...new Set(p.bars.flatMap((b) => b.parts.map((x) => x.kind)))].filter((k) => k !== "next"); // next is another shard
  const legend = html("p", { class: "legend", "aria-hidden": "true" }, ...used.map((k) =>
    html("span", {}, svg("svg", { viewBox: "0 0 10 10" }, svg("rect", { width: 10, height: 10, class: kindClass(k) })), k)));
  const items = p.bars.map((b) => html("li", {}, html("span", { class: "label" }, b.label), bar(b, 1000),
    ...(b.note ? [html("span", { class: b.bad ? "note bad" : "note" }, b.note)] : [])));
  const out = html("section", { "aria-labelledby": "p" + i }, html("h2", { id: "p" + i }, p.title), legend, html("ul", { class: "bars" }, ...items));
  if (p.more) out.append(html("p", { class: "more" }, `and ${p.more} more`));
  return out;
}

const short = (v) => v >= 100 ? String(Math.round(v)) : String(Number(v.toPrecision(3)));

// lines draws a chart: each line is broken where there is no value.
function lines(c, width, height) {
  let most = 0;
  for (const l of c.lines) for (const v of l.values) if (v !== null && v > most) most = v;
  const out = [];
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
      run.push(x.toFixed(1) + "," + (most > 0 ? height - v / most * (height - 4) - 2 : height - 2).toFixed(1));
    });
    flush();
  });
  return [out, most];
}

function chart(c, i) {
  const [drawn, most] = lines(c, 600, 120);
  const now = c.lines.map((l) => {
    const v = l.values.length ? l.values[l.values.length - 1] : null;
    return l.name + " " + (v === null ? "-" : short(v) + " " + c.unit);
  });
  const count = Math.max(0, ...c.lines.map((l) => l.values.length));
  const over = count ? `of the last ${Math.round(count * c.every_seconds / 6) / 10} minutes` : "none yet";
  const legend = html("p", { class: "legend" }, ...now.map((text, n) =>
    html("span", {}, svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("path", { d: "M0 5H10", "stroke-width": 3, class: "stroke" + n % 3 })), text)));
  return html("section", { class: "chart", "aria-labelledby": "c" + i }, html("h2", { id: "c" + i }, c.title),
    svg("svg", { role: "img", "aria-label": `${c.title}, ${over}: now ${now.join(", ")}; at most ${short(most)} ${c.unit}`, viewBox: "0 0 600 120", preserveAspectRatio: "none" }, ...drawn),
    legend, html("p", { class: "more" }, `${over}; at most ${short(most)} ${c.unit}`));
}

function row(tag, attrs, cells) {
  return html("tr", {}, ...cells.map((c) => html(tag, attrs, c)));
}

// table leaves the region that has the keyboard's focus in place.
function tables(all) {
  const root = document.getElementById("tables");
  while (root.children.length > all.length) root.lastElementChild.remove();
  all.forEach((t, i) => {
    if (!root.children[i]) {
      root.append(html("section", {}, html("h2", { id: "t" + i }),
        html("div", { class: "scroll", role: "region", "aria-labelledby": "t" + i, tabindex: 0 }, html("table", {}, html("thead"), html("tbody")))));
    }
    const at = root.children[i];
    const title = at.querySelector("h2");
    if (title.textContent !== t.title) title.textContent = t.title;
    put(at.querySelector("thead"), t.header, (h) => [row("th", { scope: "col" }, h)]);
    put(at.querySelector("tbody"), t.rows, (rows) => rows.length ? rows.map((r) => row("td", {}, r)) : [row("td", {}, ["none"])]);
    let more = at.querySelector(".more");
    if (!more) at.append(more = html("p", { class: "more" }));
    more.textContent = t.more ? `and ${t.more} more` : "";
  });
}

function show(s) {
  document.title = (s.health.well ? "" : "! ") + "kvd " + s.role;
  setText("version", `Version ${s.version}, up ${s.up}.`);
  document.getElementById("health").className = s.health.well ? "well" : "trouble";
  setText("health-text", s.health.text);
  setText("health-mend", s.health.mend || "");
  put(document.getElementById("charts"), s.charts, (all) => all.map(chart));
  put(document.getElementById("pictures"), s.pictures, (all) => all.map(picture));
  tables(s.tables);
}

let heard = null; // when the process answered last

async function ask() {
  try {
    const r = await fetch("/state.json", { signal: AbortSignal.timeout(10000) });
    if (!r.ok) throw new Error((await r.text()).trim());
    show(await r.json());
    heard = new Date();
  } catch (err) {
    document.getElementById("health").className = "trouble";
    setText("health-text", `This process does not answer (${err.message}). ` + (heard ? `The page shows its state at ${heard.toLocaleTimeString()}.` : ""));
    setText("health-mend", "");
  }
  setTimeout(tick, pause);
}

// tick asks while somebody can see the page, and no more than once at a time.
function tick() {
  if (!document.hidden) return ask();
  document.addEventListener("visibilitychange", tick, { once: true });
}

tick();
