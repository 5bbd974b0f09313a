// --- The run that is shown ------------------------------------------------------------------------------------

const RUNS = value('/summary/runs') || [];
let shown = RUNS.length ? Math.max(0, RUNS.findIndex((run) => sameRun(run, DATA.summary))) : 0;
function sameRun(run, top) {
  return run.exit_code === top.exit_code && run.iterations[0]?.start_ns === top.iterations[0]?.start_ns;
}
const at = (path) => (RUNS.length ? `/summary/runs/${shown}` : '/summary') + path;
const has = (path) => values(at(path)).length > 0;
const run = () => value(at('')) ?? DATA.summary;
const story = () => DATA.stories[shown] || [];
const each = (path) => (value(at(path)) || []).map((entry, index) => [entry, at(`${path}/${index}`)]);

const MANAGEMENT = 'mgmt0';
const colour = (index) => `var(--s${(index % 8) + 1})`;
const WORDS = {
  pass: ['✓', 'pass', 'pass'], fail: ['✗', 'fail', 'fail'], inconclusive: ['?', 'unsure', 'cannot tell'],
  note: ['!', 'unsure', 'note'], skipped: ['·', 'none', 'skipped'],
};
const VERDICTS = {
  pass: ['✓', 'pass', 'PASS'], fail: ['✗', 'fail', 'FAIL'], 'wrong-elements': ['✗', 'fail', 'FAIL: wrong elements'],
  inconclusive: ['?', 'unsure', 'INCONCLUSIVE'], 'timing-inconclusive': ['?', 'unsure', 'PASS (timing inconclusive)'],
  'not-ready': ['!', 'fail', 'NOT READY'], 'timed-out': ['✗', 'fail', 'TIMED OUT'],
  'fault-left-behind': ['✗', 'fail', 'FAULT LEFT BEHIND'], usage: ['!', 'fail', 'USAGE'],
  internal: ['!', 'fail', 'INTERNAL ERROR'], interrupted: ['!', 'unsure', 'INTERRUPTED'],
};
const section = (title, why, ...children) =>
  el('section', {}, el('h2', {}, title), why && el('p', { class: 'why' }, why), ...children);

// --- Head -----------------------------------------------------------------------------------------------------

function badge(verdict) {
  const [mark, kind, word] = VERDICTS[verdict] || ['?', 'unsure', verdict];
  return el('span', { class: `verdict ${kind}` }, el('span', { 'aria-hidden': 'true' }, mark), word);
}

function head() {
  const cluster = at('/cluster');
  return el('header', {},
    el('div', { class: 'line' }, badge(run().verdict), el('h1', {}, txt('/summary/suite'))),
    DATA.suite && el('p', { class: 'purpose' }, txt('/suite/purpose')),
    el('p', { class: 'facts' }, txt(`${cluster}/kind`), ' cluster · ', num(`count:${cluster}/nodes/*`, 'f0'), ' nodes × ',
      num(`${cluster}/ranks_per_node`, 'f0'), ' ranks × ', num(`count:${cluster}/nics/*`, 'f0'), ' NICs · fabric ',
      txt(`${cluster}/fabric`), ' · ', num(`${cluster}/bytes`, 'm2'), ' MiB a rank',
      has('/cluster/nic_rate_bits_s') && [' · ', num(`${cluster}/nic_rate_bits_s`, 'g0'), ' Mbit/s a NIC'],
      ' · backend ', txt(at('/backend')), ' · exit code ', num(at('/exit_code'), 'f0')),
    happened());
}

/** The run in a few sentences. */
function happened() {
  const parts = [];
  for (const [fault, path] of each('/faults')) {
    const spec = txt(`${path}/spec`, { class: 'mono' });
    if (!fault.fired) { parts.push('The fault ', spec, ' never fired. '); continue; }
    parts.push(fault.iteration ? ['In iteration ', num(`${path}/iteration`, 'f0'), ', '] : 'Outside every iteration, ', spec,
      ' stopped ', num(`${path}/packets_dropped`, 'f0'), fault.packets_dropped === 1 ? ' packet' : ' packets',
      fault.healed ? '. ' : ', and was LEFT BEHIND. ');
  }
  const worst = `max:${at('/repairs/*/first_drop_to_detect_ms')}?replayed_bytes`;
  if (value(worst) !== undefined) {
    parts.push('Traffic under way was missed within ', num(worst, 'f1'), ' ms');
    const resume = `max:${at('/repairs/*/detect_to_resume_ms')}?replayed_bytes`;
    if (value(resume) !== undefined) parts.push(' and flowed again over other NICs within ', num(resume, 'f1'), ' ms more');
    parts.push('; ', num(`sum:${at('/repairs/*/replayed_bytes')}`, 'm2'), ' MiB were sent again. ');
  }
  if (has('/hit_iteration')) {
    parts.push('The iteration that was hit took ', num(at('/hit_iteration/millis'), 'f1'), ' ms; its ideal is ',
      num(at('/hit_iteration/ideal_millis'), 'f1'), ' ms. ');
  }
  if (has('/hang')) {
    parts.push('Iteration ', num(at('/hang/iteration/index'), 'f0'), ' never ended: nothing moved for ',
      num(at('/hang/silent_s'), 'f1'), ' s. ');
  }
  parts.push(num(`sum:${at('/iterations/*/wrong_elements')}`, 'f0'), ' of ',
    num(`sum:${at('/iterations/*/checked_elements')}`, 'f0'), ' elements are wrong.');
  if (has('/ended_early')) parts.push(el('b', {}, ' Ended early: ', txt(at('/ended_early'))));
  return el('p', { class: 'story' }, parts);
}

function tiles() {
  const tile = (name, big, unit, ...more) =>
    el('div', { class: 'tile' }, el('div', { class: 'name' }, name),
      el('div', { class: name === 'Wrong elements' && run().iterations.some((one) => one.wrong_elements) ? 'big fail' : 'big' }, big, unit && el('span', { class: 'unit' }, ' ', unit)), el('div', { class: 'more' }, more));
  const last = run().iterations.length - 1;
  const found = [tile('Wrong elements', num(`sum:${at('/iterations/*/wrong_elements')}`, 'f0'), '', 'all ranks and iterations')];
  if (has('/baseline/millis/0')) {
    found.push(tile('Healthy iteration', num(at('/baseline/median_millis'), 'f1'), 'ms', 'median of ',
      num(`count:${at('/baseline/millis/*')}`, 'f0'), ', spread ', num(at('/baseline/mad_percent'), 'f2'), ' %',
      has('/baseline/t0_millis') && [', ', num(`ratio:${at('/baseline/median_millis')}|${at('/baseline/t0_millis')}`, 'f3'), ' × T',
        el('sub', { class: 'axis' }, '0'), ' at plain TCP’s goodput']));
  }
  if (last >= 0 && run().baseline.median_millis > 0) {
    found.push(tile('Last iteration', num(`ratio:${at(`/iterations/${last}/millis`)}|${at('/baseline/median_millis')}`, 'f3'),
      '× healthy', num(at(`/iterations/${last}/millis`), 'f1'), ' ms'));
  }
  if (has('/hit_iteration')) {
    found.push(tile('Cost of the failure', num(at('/hit_iteration/over_millis'), 'f1'), 'ms',
      'iteration ', num(at('/hit_iteration/index'), 'f0'), ': ', num(at('/hit_iteration/millis'), 'f1'), ' ms, ideal ',
      num(at('/hit_iteration/ideal_millis'), 'f1'), ' ms'));
  }
  if (run().transport.payload_bytes > 0) {
    found.push(tile('Sent again', num(`percent:${at('/transport/replayed_bytes')}|${at('/transport/payload_bytes')}`, 'f3'), '%',
      num(at('/transport/replayed_bytes'), 'm2'), ' of ', num(at('/transport/payload_bytes'), 'm1'), ' MiB; paths: ',
      num(at('/transport/paths_suspected'), 'f0'), ' suspected, ', num(at('/transport/paths_failed'), 'f0'), ' failed'));
  }
  return el('div', { class: 'tiles' }, found);
}

function runs() {
  if (!RUNS.length) return null;
  const rows = RUNS.map((one, index) => {
    const path = `/summary/runs/${index}`;
    const hit = one.hit_iteration ? num(`${path}/hit_iteration/over_millis`, 'f1') : '–';
    return el('tr', {}, el('td', {}, el('button', { 'aria-pressed': index === shown, onclick: () => show(index) }, one.row ? txt(`${path}/row`) : axis(`Run ${index + 1}`))),
      el('td', { class: 'word' }, badge(one.verdict)), el('td', { class: 'r' }, num(`${path}/baseline/median_millis`, 'f1')),
      el('td', { class: 'r' }, num(`${path}/baseline/mad_percent`, 'f2')), el('td', { class: 'r' }, hit),
      el('td', { class: 'r' }, num(`sum:${path}/iterations/*/wrong_elements`, 'f0')));
  });
  return section('Runs', 'The worst is shown first; choose another to see it below.',
    el('div', { class: 'scroll' }, el('table', {}, el('thead', {}, el('tr', {}, ['', 'Verdict'].map((name) => el('th', {}, name)),
      ['Healthy, ms', 'Spread, %', 'Over ideal, ms', 'Wrong'].map((name) => el('th', { class: 'r' }, name)))),
    el('tbody', {}, rows))));
}

function checks() {
  // What did not pass comes first.
  const order = ['fail', 'inconclusive', 'note', 'pass', 'skipped'];
  const rows = each('/checks').sort(([a], [b]) => order.indexOf(a.status) - order.indexOf(b.status)).map(([check, path]) => {
    const [mark, kind, word] = WORDS[check.status];
    return el('div', {}, el('span', { class: `is ${kind}` }, el('span', { 'aria-hidden': 'true' }, mark), ` ${word}`),
      el('span', {}, txt(`${path}/name`)),
      el('span', { class: 'of' }, el('b', {}, txt(`${path}/actual`)), check.unit && [' ', txt(`${path}/unit`)],
        ' · expected ', txt(`${path}/expected`), check.detail && [' · ', txt(`${path}/detail`)]));
  });
  return section('Checks', null, el('div', { class: 'box' }, el('div', { class: 'checks' }, rows)));
}

// --- Iterations -----------------------------------------------------------------------------------------------

const hitBy = (index) => run().faults.some((fault) => fault.iteration === index);
const key = (paint, name, shape = 'rect') => el('span', {}, svg('svg', { width: 14, height: 12, 'aria-hidden': 'true' },
  shape === 'line' ? line(0, 6, 14, 6, { stroke: paint, 'stroke-width': 2.5 })
    : shape === 'dash' ? line(0, 6, 14, 6, { stroke: paint, 'stroke-width': 2, 'stroke-dasharray': '4 3' })
      : shape === 'dots' ? line(0, 6, 14, 6, { stroke: paint, 'stroke-width': 2, 'stroke-dasharray': '1.5 3' })
        : svg('rect', { width: 12, height: 12, rx: 2.5, fill: paint })), name);

/** Positions of iterations along `width`, and which of them are labelled. */
function columns(width, left, count) {
  const step = (width - left - 4) / Math.max(1, count);
  const every = Math.max(1, Math.ceil(24 / step));
  return { step, bar: Math.max(2, Math.min(44, step * 0.68)), middle: (i) => left + (i + 0.5) * step, labelled: (i) => i % every === 0 };
}

function times() {
  const iterations = run().iterations;
  if (!iterations.length) return null;
  const ideal = iterations.some((one) => one.ideal_millis);
  const draw = (width) => {
    const [height, left, top, bottom] = [240, 48, 12, 22];
    const most = Math.max(...iterations.map((one) => one.millis), run().baseline.median_millis) * 1.06;
    const scale = (height - top - bottom) / most;
    const y = (millis) => height - bottom - millis * scale;
    const columnsOf = columns(width, left, iterations.length);
    const picture = frame(width, height, 'Time of each iteration', svg('g', {}, ticks(most, 4).map((tick) =>
      [grid(left, y(tick), width, y(tick)), label(left - 7, y(tick) + 4, tickText(tick), 'end')])));
    const bars = svg('g', { 'data-scale': scale });
    each('/iterations').forEach(([one, path], i) => {
      const x = columnsOf.middle(i) - columnsOf.bar / 2;
      bars.append(tip(svg('rect', { x, y: y(one.millis), width: columnsOf.bar, height: Math.max(0, one.millis * scale), rx: 2,
        fill: one.wrong_elements ? 'var(--s4)' : hitBy(one.index) ? 'var(--s8)' : 'var(--s1)', 'data-at': `${path}/millis` }),
      () => [[el('b', {}, 'Iteration ', num(`${path}/index`, 'f0')), ': ', num(`${path}/millis`, 'f1'), ' ms, ',
        num(`ratio:${path}/millis|${at('/baseline/median_millis')}`, 'f3'), ' × healthy'],
      one.ideal_millis ? ['ideal ', num(`${path}/ideal_millis`, 'f1'), ' ms'] : 'no ideal: a fault begins or ends within it',
      [num(`${path}/wrong_elements`, 'f0'), ' of ', num(`${path}/checked_elements`, 'f0'), ' elements wrong']]));
      if (one.ideal_millis) picture.append(line(x - 3, y(one.ideal_millis), x + columnsOf.bar + 3, y(one.ideal_millis),
        { stroke: 'var(--ink)', 'stroke-width': 1.6, class: 'ideal' }));
      if (one.wrong_elements) picture.append(label(columnsOf.middle(i), height - bottom - 8, '✗', 'middle', 'onbar'));
      if (columnsOf.labelled(i)) picture.append(label(columnsOf.middle(i), height - 6, one.index));
    });
    const median = run().baseline.median_millis;
    picture.insertBefore(bars, picture.childNodes[1]);
    picture.append(line(left, y(median), width, y(median), { stroke: 'var(--s2)', 'stroke-width': 1.6, 'stroke-dasharray': '5 4' }));
    return picture;
  };
  return section('Time of each iteration', 'In milliseconds, from the first rank’s call to the last rank’s return.',
    el('div', { class: 'legend' }, key('var(--s1)', 'iteration'), run().faults.some((f) => f.iteration) && key('var(--s8)', 'hit by a fault'),
      iterations.some((one) => one.wrong_elements) && key('var(--s4)', '✗ wrong elements'),
      ideal && key('var(--ink)', 'its ideal', 'line'), key('var(--s2)', 'healthy median', 'dash')),
    chart(draw));
}

/** Completed iterations over the time spent in them: as it ran, at best, and had nothing failed. */
function progress() {
  const iterations = run().iterations;
  if (!iterations.length || !run().baseline.median_millis) return null;
  const cumulated = (of) => iterations.reduce((sums, one) => [...sums, sums[sums.length - 1] + of(one)], [0]);
  const ideal = iterations.every((one) => one.ideal_millis) ? cumulated((one) => one.ideal_millis) : null;
  const [ran, healthy] = [cumulated((one) => one.millis), cumulated(() => run().baseline.median_millis)];
  const planned = DATA.suite ? DATA.suite.workload.iterations : iterations.length;
  const draw = (width) => {
    const [height, left, top, bottom, right] = [240, 30, 12, 22, 12];
    const most = Math.max(ran[ran.length - 1], ideal ? ideal[ideal.length - 1] : 0, healthy[healthy.length - 1]) * 1.02;
    const x = (millis) => left + (millis / most) * (width - left - right);
    const y = (done) => height - bottom - (done / Math.max(planned, iterations.length)) * (height - top - bottom);
    const path = (sums, attributes) => svg('path', { fill: 'none', 'stroke-width': 2,
      d: sums.map((sum, done) => `${done ? 'L' : 'M'}${x(sum).toFixed(1)} ${y(done).toFixed(1)}`).join(''), ...attributes });
    const picture = frame(width, height, 'Completed iterations over time',
      ticks(Math.max(planned, iterations.length), 5).filter(Number.isInteger).map((tick) =>
        [grid(left, y(tick), width - right, y(tick)), label(left - 7, y(tick) + 4, tick, 'end')]),
      ticks(most / 1e3, width > 500 ? 6 : 4).map((tick) => label(x(tick * 1e3), height - 5, `${tickText(tick)} s`)));
    run().faults.forEach((fault) => {
      const hit = iterations.findIndex((one) => one.index === fault.iteration);
      if (hit < 0 || !fault.fired_at_ns) return;
      const when = x(ran[hit] + (fault.fired_at_ns - iterations[hit].start_ns) / 1e6);
      picture.append(line(when, top, when, height - bottom, { stroke: 'var(--s8)', 'stroke-width': 1.5 }), label(when + 5, height - bottom - 6, 'fault', 'start'));
    });
    picture.append(path(healthy, { stroke: 'var(--s2)', 'stroke-dasharray': '1.5 4' }));
    if (ideal) picture.append(path(ideal, { stroke: 'var(--ink)', 'stroke-dasharray': '6 4' }));
    picture.append(path(ran, { stroke: 'var(--s1)', 'stroke-width': 2.5 }));
    each('/iterations').forEach(([, entry], i) => picture.append(tip(svg('circle', { cx: x(ran[i + 1]), cy: y(i + 1), r: 4, fill: 'var(--s1)', stroke: 'var(--surface)' }),
      () => [[el('b', {}, 'Iteration ', num(`${entry}/index`, 'f0'))], [num(`${entry}/millis`, 'f1'), ' ms']])));
    return picture;
  };
  return section('Job progress against ideal', 'Iterations completed over the time spent in them; pauses for checking are left out.',
    el('div', { class: 'legend' }, key('var(--s1)', ['as it ran: ', num(`sum:${at('/iterations/*/millis')}`, 's2'), ' s'], 'line'),
      ideal && key('var(--ink)', ['ideal under these faults: ', num(`sum:${at('/iterations/*/ideal_millis')}`, 's2'), ' s'], 'dash'),
      key('var(--s2)', ['had nothing failed: ', num(`times:${at('/baseline/median_millis')}|count:${at('/iterations/*')}`, 's2'), ' s'], 'dots')),
    chart(draw));
}

// --- Traffic --------------------------------------------------------------------------------------------------

let direction = 'passed_rx_bytes';
const nicsOf = (node) => {
  const named = new Set(run().cluster.nics);
  run().iterations.forEach((one) => Object.keys(one.nics[node] || {}).forEach((nic) => nic !== MANAGEMENT && named.add(nic)));
  return [...named];
};

function traffic() {
  const iterations = run().iterations;
  if (!iterations.some((one) => Object.keys(one.nics).length)) return null;
  const moved = (one, node, nic) => one.nics[node]?.[nic]?.[direction] ?? 0;
  const nodes = run().cluster.nodes;
  const total = (one, node) => nicsOf(node).reduce((sum, nic) => sum + moved(one, node, nic), 0);
  const most = Math.max(1, ...iterations.flatMap((one) => nodes.map((node) => total(one, node)))) / 2 ** 20 * 1.05;
  const panel = (node, number) => el('div', {}, el('h3', {}, txt(at(`/cluster/nodes/${number}`))), chart((width) => {
    const [height, left, top, bottom] = [190, 40, 8, 20];
    const scale = (height - top - bottom) / most;
    const columnsOf = columns(width, left, iterations.length);
    const y = (mib) => height - bottom - mib * scale;
    const bars = svg('g', { 'data-scale': scale / 2 ** 20 });
    each('/iterations').forEach(([one, path], i) => {
      let below = 0;
      const lines = () => [[el('b', {}, 'Iteration ', num(`${path}/index`, 'f0'))],
        ...nicsOf(node).map((nic) => [axis(`${nic}: `), num(`${path}/nics/${node}/${nic}/${direction}`, 'm1'), ' MiB'])];
      nicsOf(node).forEach((nic, n) => {
        const tall = (moved(one, node, nic) / 2 ** 20) * scale;
        bars.append(tip(svg('rect', { x: columnsOf.middle(i) - columnsOf.bar / 2, y: y(0) - below - tall, width: columnsOf.bar, height: tall,
          fill: colour(n), stroke: 'var(--surface)', 'stroke-width': tall > 3 ? 1 : 0, 'data-at': `${path}/nics/${node}/${nic}/${direction}` }), lines));
        below += tall;
      });
    });
    return frame(width, height, `MiB of each NIC of ${node} by iteration`,
      ticks(most, 4).map((tick) => [grid(left, y(tick), width, y(tick)), label(left - 6, y(tick) + 4, tickText(tick), 'end')]), bars,
      iterations.map((one, i) => columnsOf.labelled(i) && label(columnsOf.middle(i), height - 5, one.index, 'middle', hitBy(one.index) ? 'strong' : '')));
  }));
  const choose = (name, what) => el('button', { 'aria-pressed': direction === what, onclick: () => { direction = what; show(shown); } }, name);
  const columnsHead = nodes.flatMap((node) => nicsOf(node).map((nic) => el('th', { class: 'r' }, axis(node), el('br'), axis(nic))));
  const rows = each('/iterations').map(([one, path]) => el('tr', { class: hitBy(one.index) ? 'hit' : '' },
    el('td', {}, hitBy(one.index) ? 'fault ' : '', num(`${path}/index`, 'f0')),
    el('td', { class: 'r' }, num(`${path}/millis`, 'f1')),
    el('td', { class: 'r' }, num(`ratio:${path}/millis|${at('/baseline/median_millis')}`, 'f3')),
    nodes.flatMap((node) => nicsOf(node).map((nic) => el('td', { class: 'r' }, num(`${path}/nics/${node}/${nic}/${direction}`, 'm1')))),
    el('td', { class: 'r' }, num(`${path}/wrong_elements`, 'f0'))));
  return section('Traffic of each NIC by iteration', 'MiB that the NIC moved and the injector let pass, headers included.',
    el('div', { class: 'choice', role: 'group' }, choose('received', 'passed_rx_bytes'), choose('sent', 'passed_tx_bytes')),
    el('div', { class: 'legend' }, nicsOf(nodes[0]).map((nic, n) => key(colour(n), axis(nic)))),
    el('div', { class: 'panels' }, nodes.map(panel)),
    el('details', {}, el('summary', {}, 'As a table'), el('div', { class: 'scroll' }, el('table', {}, el('thead', {}, el('tr', {},
      el('th', {}, 'Iteration'), el('th', { class: 'r' }, 'ms'), el('th', { class: 'r' }, '× healthy'), columnsHead, el('th', { class: 'r' }, 'Wrong'))),
    el('tbody', {}, rows)))));
}
