// --- Timeline: detect, notify, replay, resume -----------------------------------------------------------------

let focus = 0; // A fault's number, or -1: the whole run.
let settled = false; // Until nothing more happens, or only until traffic flows again.

const MARKS = {
  detect: ['detected', 'var(--s8)', (x, y) => svg('circle', { cx: x, cy: y, r: 5 })],
  notify: ['told by the peer', 'var(--s5)', (x, y) => svg('path', { d: `M${x} ${y - 6}l6 6l-6 6l-6 -6z` })],
  suspect: ['suspected', 'var(--s3)', (x, y) => svg('circle', { cx: x, cy: y, r: 3.6 })],
  failed: ['path given up', 'var(--s4)', (x, y) => svg('path', { d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`, stroke: 'var(--s4)', 'stroke-width': 2.4 })],
  resume: ['traffic resumed', 'var(--s2)', (x, y) => svg('path', { d: `M${x - 5} ${y - 6}l10 6l-10 6z` })],
  view: ['knows which NIC', 'var(--s6)', (x, y) => svg('rect', { x: x - 2.2, y: y - 7, width: 4.4, height: 14, rx: 1 })],
  live: ['taken back', 'var(--s7)', (x, y) => svg('path', { d: `M${x} ${y - 6}l6 10h-12z` })],
  switch: ['new schedule', 'var(--s1)', (x, y) => svg('rect', { x: x - 5, y: y - 5, width: 10, height: 10, rx: 1 })],
};

/** Everything that has a time and a rank. A repair's own figures come from the summary, the rest from the events. */
function moments() {
  const found = [];
  each('/repairs').forEach(([repair, path]) => {
    const fault = run().faults.findIndex((one) => one.first_drop_ns !== null);
    const noticed = repair.noticed_ns ?? (fault >= 0 && repair.first_drop_to_detect_ms !== null
      ? run().faults[fault].first_drop_ns + repair.first_drop_to_detect_ms * 1e6 : null);
    if (noticed === null || noticed === undefined) return;
    const lines = () => [[el('b', {}, repair.cause === 'peer' ? 'Told by the peer' : 'Detected'), ' by rank ', num(`${path}/rank`, 'f0'),
      ' towards ', num(`${path}/peer`, 'f0'), ' on ', txt(`${path}/nic`), ': ', txt(`${path}/cause`)],
    [num(`${path}/first_drop_to_detect_ms`, 'f1'), ' ms after the first drop'],
    repair.detect_to_resume_ms !== null && ['resumed ', num(`${path}/detect_to_resume_ms`, 'f1'), ' ms later'],
    [num(`${path}/replayed_bytes`, 'm2'), ' MiB sent again']].filter(Boolean);
    found.push({ rank: repair.rank, ns: noticed, kind: repair.cause === 'peer' ? 'notify' : 'detect', lines, weight: repair.replayed_bytes });
    if (repair.detect_to_resume_ms !== null) {
      const end = noticed + repair.detect_to_resume_ms * 1e6;
      found.push({ rank: repair.rank, ns: noticed, end, kind: 'replay', lines, path, weight: repair.replayed_bytes });
      found.push({ rank: repair.rank, ns: end, kind: 'resume', lines, weight: repair.replayed_bytes });
    }
  });
  const repaired = new Set(found.map((one) => `${one.rank} ${one.ns}`));
  story().forEach((event, index) => {
    const path = `/stories/${shown}/${index}`;
    const known = event.kind === 'live' ? event.text.includes('proving -> live') : MARKS[event.kind];
    if (!known || event.kind === 'resume' || (event.kind === 'suspect' && repaired.has(`${event.rank} ${event.at_ns}`))) return;
    found.push({ rank: event.rank, ns: event.at_ns, kind: event.kind, weight: 0,
      lines: () => [[el('b', {}, MARKS[event.kind][0]), ', rank ', num(`${path}/rank`, 'f0')], [txt(`${path}/text`)]] });
  });
  return found;
}

function timeline() {
  const all = moments();
  const fired = run().faults.map((fault, index) => [fault, index]).filter(([fault]) => fault.first_drop_ns ?? fault.fired_at_ns);
  const iterations = run().iterations;
  if (!iterations.length || (!all.length && !fired.length)) return null;
  if (!fired.some(([, index]) => index === focus)) focus = fired.length ? fired[0][1] : -1;
  const begin = iterations[0].start_ns;
  let [from, to, origin] = [begin, iterations[iterations.length - 1].end_ns, begin];
  if (focus >= 0) {
    const fault = run().faults[focus];
    origin = fault.first_drop_ns ?? fault.fired_at_ns;
    const next = Math.min(Infinity, ...fired.map(([one]) => one.first_drop_ns ?? one.fired_at_ns).filter((ns) => ns > origin));
    const told = all.map((one) => one.end ?? one.ns).filter((ns) => ns >= origin && ns < Math.min(next, origin + 1e9));
    const flowing = all.filter((one) => one.weight > 0 && one.kind === 'resume' && told.includes(one.ns)).map((one) => one.ns);
    const last = settled || !flowing.length ? Math.max(origin + 20e6, ...told) : origin + (Math.max(...flowing) - origin) * 1.6;
    [from, to] = [origin - (last - origin) * 0.06, last + (last - origin) * 0.06];
  }
  const perNode = run().cluster.ranks_per_node || 1;
  const ranks = run().cluster.nodes.length * perNode;
  const within = all.filter((one) => (one.end ?? one.ns) >= from && one.ns <= to);
  const draw = (width) => {
    const narrow = width < 560;
    const [left, top, lane, bottom] = [narrow ? 30 : 116, 24, 34, 26];
    const height = top + ranks * lane + bottom;
    const x = (ns) => left + ((ns - from) / (to - from)) * (width - left - 10);
    const picture = frame(width, height, 'Timeline of the ranks');
    const [unit, scale] = focus >= 0 ? ['ms', 1e6] : ['s', 1e9];
    const span = (to - origin) / scale;
    ticks(span, narrow ? 4 : 8).forEach((tick) => {
      const at = x(origin + tick * scale);
      picture.append(grid(at, top, at, height - bottom), label(at, height - 8, `${tickText(tick)} ${unit}`, at > width - 30 ? 'end' : 'middle'));
    });
    iterations.forEach((one) => {
      if (one.end_ns < from || one.start_ns > to || focus >= 0) return;
      const [a, b] = [x(Math.max(one.start_ns, from)), x(Math.min(one.end_ns, to))];
      picture.append(svg('rect', { x: a, y: top - 16, width: Math.max(1, b - a - 1), height: 13, rx: 2, fill: hitBy(one.index) ? 'var(--s8)' : 'var(--s1)', opacity: 0.35 }));
      if (b - a > 18) picture.append(label((a + b) / 2, top - 5, one.index));
    });
    run().faults.forEach((fault) => {
      const start = fault.first_drop_ns ?? fault.fired_at_ns;
      if (!start || start > to) return;
      const end = Math.min(to, fault.healed_at_ns ?? to);
      if (end < from) return;
      picture.append(svg('rect', { x: x(Math.max(start, from)), y: top, width: Math.max(1, x(end) - x(Math.max(start, from))), height: ranks * lane, fill: 'var(--s8)', opacity: 0.07 }),
        line(x(start), top - 4, x(start), height - bottom, { stroke: 'var(--s8)', 'stroke-width': 1.6 }));
    });
    if (focus >= 0) picture.append(label(x(origin), top - 9, 'first packet stopped', x(origin) > width / 2 ? 'end' : 'start', 'strong'));
    for (let rank = 0; rank < ranks; rank += 1) {
      const middle = top + rank * lane + lane / 2;
      picture.append(grid(left, top + (rank + 1) * lane, width, top + (rank + 1) * lane),
        label(left - 8, middle + 4, narrow ? rank : `${run().cluster.nodes[Math.floor(rank / perNode)]} rank ${rank}`, 'end'));
      const mine = within.filter((one) => one.rank === rank);
      mine.filter((one) => one.kind === 'replay').forEach((one) => picture.append(tip(svg('rect', { x: x(one.ns), y: middle - 5,
        width: Math.max(2, x(one.end) - x(one.ns)), height: 10, rx: 2, fill: 'var(--s1)', opacity: 0.55 }), one.lines)));
      // Marks of one kind that would cover each other are one mark.
      const groups = [];
      mine.filter((one) => one.kind !== 'replay').sort((a, b) => a.ns - b.ns).forEach((one) => {
        const near = groups.find((group) => group[0].kind === one.kind && Math.abs(x(group[0].ns) - x(one.ns)) < 5);
        if (near) near.push(one); else groups.push([one]);
      });
      groups.forEach((group) => picture.append(tip(svg('g', { class: 'mark', fill: MARKS[group[0].kind][1], stroke: 'var(--surface)', 'stroke-width': 1 }, MARKS[group[0].kind][2](x(group[0].ns), middle)),
        () => [...group.slice(0, 4).flatMap((one) => one.lines()), ...(group.length > 4 ? [axis(`and ${group.length - 4} more`)] : [])])));
      const told = mine.filter((one) => one.kind === 'replay' && one.weight > 0).sort((a, b) => b.weight - a.weight)[0];
      const free = told && !mine.some((one) => one.ns > told.end && x(one.ns) < x(told.end) + 178);
      if (told && free && !narrow && focus >= 0 && x(told.end) + 178 < width) {
        picture.append(svg('text', { x: x(told.end) + 9, y: middle + 4 }, num(`${told.path}/first_drop_to_detect_ms`, 'f1', 'tspan'), ' + ',
          num(`${told.path}/detect_to_resume_ms`, 'f1', 'tspan'), ' ms, ', num(`${told.path}/replayed_bytes`, 'm2', 'tspan'), ' MiB again'));
      }
    }
    return picture;
  };
  const kinds = [...new Set(within.map((one) => one.kind))];
  const legend = Object.entries(MARKS).filter(([kind]) => kinds.includes(kind)).map(([, [name, paint, shape]]) =>
    el('span', {}, svg('svg', { width: 14, height: 14, 'aria-hidden': 'true', fill: paint }, shape(7, 7)), name));
  if (kinds.includes('replay')) legend.splice(2, 0, el('span', {}, svg('svg', { width: 18, height: 14, 'aria-hidden': 'true' },
    svg('rect', { y: 2, width: 18, height: 10, rx: 2, fill: 'var(--s1)', opacity: 0.55 })), 'replay'));
  const choose = (name, what, until) => el('button', { 'aria-pressed': focus === what && settled === until,
    onclick: () => { focus = what; settled = until; show(shown); } }, name);
  const named = (index, words) => (fired.length > 1 ? axis(`fault ${index + 1} ${words}`) : words);
  return section('Timeline of each rank', focus >= 0 ? 'Milliseconds since the first packet was stopped.' : 'Seconds since the first iteration began.',
    el('div', { class: 'choice', role: 'group' }, fired.map(([, index]) => [choose(named(index, 'until traffic flows again'), index, false),
      choose(named(index, 'until all is settled'), index, true)]), choose('whole run', -1, false)),
    el('div', { class: 'legend' }, legend), chart(draw), repairs());
}

function repairs() {
  if (!run().repairs.length) return null;
  const rows = each('/repairs').map(([, path]) => el('tr', {}, el('td', { class: 'r' }, num(`${path}/rank`, 'f0')), el('td', { class: 'r' }, num(`${path}/peer`, 'f0')),
    el('td', {}, txt(`${path}/nic`)), el('td', {}, txt(`${path}/cause`)), el('td', { class: 'r' }, num(`${path}/first_drop_to_detect_ms`, 'f1')),
    el('td', { class: 'r' }, num(`${path}/detect_to_resume_ms`, 'f1')), el('td', { class: 'r' }, num(`${path}/replayed_bytes`, 'm2'))));
  return el('details', {}, el('summary', {}, 'Repairs as a table'), el('div', { class: 'scroll' }, el('table', {}, el('thead', {}, el('tr', {},
    el('th', { class: 'r' }, 'Rank'), el('th', { class: 'r' }, 'Peer'), el('th', {}, 'NIC'), el('th', {}, 'Noticed by'), el('th', { class: 'r' }, 'Drop to detection, ms'),
    el('th', { class: 'r' }, 'To resumption, ms'), el('th', { class: 'r' }, 'Sent again, MiB'))), el('tbody', {}, rows))));
}

// --- What is left ---------------------------------------------------------------------------------------------

function views() {
  const seen = value(at('/fault_view')) || {};
  const switched = value(at('/switch')) || {};
  const ranks = [...new Set([...Object.keys(seen), ...Object.keys(switched)])].sort((a, b) => a - b);
  if (!ranks.length) return null;
  const place = (rank, index) => {
    const path = at(`/fault_view/${rank}/${index}`);
    const parts = ['node', 'nic'].filter((name) => value(`${path}/${name}`));
    const named = parts.length ? parts : ['rail'];
    return [named.map((name, i) => [i ? '/' : '', txt(`${path}/${name}`)]), ' ', txt(`${path}/state`), ' (', txt(`${path}/cause`), ')'];
  };
  const rows = ranks.map((rank) => el('tr', {}, el('td', { class: 'r' }, axis(rank)),
    el('td', {}, (seen[rank] || []).length ? seen[rank].map((_, i) => [i ? ', ' : '', place(rank, i)]) : 'nothing is wrong'),
    Object.keys(switched).length > 0 && el('td', { class: 'r' }, switched[rank] === undefined ? '–' : num(at(`/switch/${rank}`), 'f0'))));
  return section('What each rank knew', 'Each rank’s fault view at its fullest, from its own event file.', el('div', { class: 'scroll' }, el('table', {},
    el('thead', {}, el('tr', {}, el('th', { class: 'r' }, 'Rank'), el('th', {}, 'Fault view'),
      Object.keys(switched).length > 0 && el('th', { class: 'r' }, 'New schedule from collective'))), el('tbody', {}, rows))));
}

/** Rows of a sweep, in nccl-tests' terms. */
function sweep() {
  if (!has('/sweep/0')) return null;
  const half = (path) => [num(`${path}/time_us`, 'f2'), num(`${path}/alg_bw`, 'f2'), num(`${path}/bus_bw`, 'f2'), num(`${path}/wrong`, 'f0')];
  const right = (cells, tag = 'td') => cells.map((cell) => el(tag, { class: 'r' }, cell));
  const rows = each('/sweep').map(([record, path]) => el('tr', { class: record.phase === 'hit' ? 'hit' : '' },
    el('td', {}, txt(`${path}/collective`)), el('td', {}, txt(`${path}/phase`)), right([num(`${path}/row/size`, 'f0')]),
    el('td', {}, txt(`${path}/row/dtype`)), el('td', {}, txt(`${path}/row/op`)),
    right(half(`${path}/row/out_of_place`)), right(half(`${path}/row/in_place`))));
  const heads = ['time, µs', 'algbw, GB/s', 'busbw, GB/s', 'wrong'];
  return section('Sweep', 'Each size out of place and, where it is defined, in place; healthy, hit by the faults, and under them.',
    el('div', { class: 'scroll' }, el('table', {}, el('thead', {},
      el('tr', {}, el('th', { colspan: 5 }), el('th', { class: 'r', colspan: 4 }, 'out of place'), el('th', { class: 'r', colspan: 4 }, 'in place')),
      el('tr', {}, el('th', {}, 'Collective'), el('th', {}, 'Phase'), el('th', { class: 'r' }, 'Bytes'), el('th', {}, 'Type'), el('th', {}, 'Op'),
        right([...heads, ...heads], 'th'))), el('tbody', {}, rows))));
}

function environment() {
  const names = Object.keys(run().environment);
  if (!names.length) return null;
  return section('Environment', null, el('div', { class: 'scroll' }, el('table', {}, el('tbody', {}, names.map((name) =>
    el('tr', {}, el('td', {}, axis(name)), el('td', { class: 'mono' }, txt(at(`/environment/${name.replaceAll('~', '~0').replaceAll('/', '~1')}`)))))))));
}

function show(index) {
  shown = index;
  charts.length = 0;
  const scrolled = scrollY;
  const open = [...document.querySelectorAll('details')].map((one) => one.open);
  document.getElementById('page').replaceChildren(...[head(), tiles(), runs(), checks(), el('div', { class: 'pair' }, times(), progress()),
    traffic(), sweep(), timeline(), views(), environment(), el('footer', {}, 'Made by ', axis('r2cc-bench'), ' from summary.json and run.jsonl of this run. The page needs no network.')].filter(Boolean));
  document.querySelectorAll('details').forEach((one, i) => { one.open = Boolean(open[i]); });
  redraw();
  scrollTo(0, scrolled);
}
show(shown);
