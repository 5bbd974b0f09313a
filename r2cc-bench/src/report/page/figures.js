'use strict';
const DATA = JSON.parse(document.getElementById('data').textContent);

// Every number on the page is an expression over the data, kept beside it in `data-at`, so that it can be checked:
// a pointer, or `op:argument|argument`. A pointer may hold one `*`; `?name` behind it leaves only those whose
// sibling `name` is not 0. `~1` in a pointer stands for `/`.
function values(pointer) {
  const [path, wanted] = pointer.split('?');
  let found = [DATA];
  const parts = path.split('/').slice(1);
  parts.forEach((part, depth) => {
    found = found.flatMap((at) => {
      if (at === null || at === undefined) return [];
      if (part === '*') return Object.values(at);
      if (wanted && depth === parts.length - 1 && !at[wanted]) return [];
      return [at[part.replaceAll('~1', '/').replaceAll('~0', '~')]];
    });
  });
  return found.filter((at) => at !== null && at !== undefined);
}

function value(expression) {
  const colon = expression.indexOf(':');
  if (colon < 0) return values(expression)[0];
  const [first, second] = expression.slice(colon + 1).split('|');
  const numbers = values(first);
  switch (expression.slice(0, colon)) {
    case 'sum': return numbers.reduce((sum, number) => sum + number, 0);
    case 'max': return numbers.length ? Math.max(...numbers) : undefined;
    case 'count': return numbers.length;
    case 'ratio': return numbers[0] / value(second);
    case 'percent': return (100 * numbers[0]) / value(second);
    case 'times': return numbers[0] * value(second);
    case 'since': return (numbers[0] - value(second)) / 1e6;
    default: throw new Error(`no such figure: ${expression}`);
  }
}

function written(number, as) {
  if (number === undefined || !Number.isFinite(number)) return '–';
  const [unit, digits] = [as[0], Number(as.slice(1))];
  const scaled = unit === 'm' ? number / 2 ** 20 : unit === 's' ? number / 1e3 : unit === 'g' ? number / 1e6 : number;
  const text = scaled.toFixed(digits).replace(/^-(0(\.0*)?)$/, '$1');
  return text.replace(/\B(?=(\d{3})+(?!\d)(?=$|\.))/g, ',').replace(/^-/, '−');
}

// --- Elements -------------------------------------------------------------------------------------------------

function fill(element, attributes, children) {
  for (const [name, what] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), what);
    else if (what !== undefined && (what !== false || name.startsWith('aria-'))) element.setAttribute(name, what);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

/** A number: `f1` as it is with one digit, `m1` bytes as MiB, `s2` milliseconds as seconds, `g0` bit/s as Mbit/s. */
const num = (expression, as, tag = 'span') =>
  (tag === 'tspan' ? svg : el)(tag, { 'data-at': expression, 'data-as': as }, written(value(expression), as));
/** Words, as they stand in the data. */
const txt = (pointer, attributes) => el('span', { ...attributes, 'data-text': pointer }, String(value(pointer) ?? '–'));
/** A position or a name of an axis. */
const axis = (text, attributes) => el('span', { class: 'axis', ...attributes }, text);

// --- Tips -----------------------------------------------------------------------------------------------------

const tips = new WeakMap();
function tip(element, lines) {
  tips.set(element, lines);
  element.setAttribute('data-tip', '');
  return element;
}
const bubble = document.getElementById('tip');
document.addEventListener('pointermove', (event) => {
  const owner = event.target.closest ? event.target.closest('[data-tip]') : null;
  bubble.hidden = !owner;
  if (!owner) return;
  bubble.replaceChildren(...tips.get(owner)().map((line) => el('div', {}, line)));
  const { width, height } = bubble.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - width - 8);
  const above = event.clientY - height - 12;
  bubble.style.left = `${Math.max(8, left)}px`;
  bubble.style.top = `${above > 8 ? above : event.clientY + 16}px`;
});

// --- Charts ---------------------------------------------------------------------------------------------------

const charts = [];
/** A place that `draw(width)` fills again whenever its width changes. */
function chart(draw) {
  const place = el('div', { class: 'chart' });
  charts.push({ place, draw, width: 0 });
  return place;
}
function redraw() {
  for (const one of charts) {
    const width = Math.floor(one.place.clientWidth);
    if (width < 40 || width === one.width) continue;
    one.width = width;
    one.place.replaceChildren(one.draw(width));
  }
}
addEventListener('resize', redraw);

function ticks(most, wanted) {
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let at = 0; at <= most * 1.0001; at += step) found.push(at);
  return found;
}
const tickText = (at) => at.toLocaleString('en-US', { maximumFractionDigits: 2 });
const label = (x, y, text, anchor = 'middle', extra = '') =>
  svg('text', { x, y, 'text-anchor': anchor, class: `axis ${extra}` }, text);
const line = (x1, y1, x2, y2, attributes) => svg('line', { x1, y1, x2, y2, ...attributes });
const grid = (x1, y1, x2, y2) => line(x1, y1, x2, y2, { class: 'gridline' });
const frame = (width, height, name, ...children) =>
  svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': name }, ...children);
