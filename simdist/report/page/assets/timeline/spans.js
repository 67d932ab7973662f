// Single operations: which one is at a place, which are beside it, and what there is to say about it.

/** Return the row of a lane that runs at a moment, or -1. */
function rowAt(timeline, { rank, trace, stream }, atS) {
  const { tickS, streams } = timeline.traces[trace];
  const { n, waitStyles } = timeline.plan.streams[stream];
  const { ready, start, reach } = streams[stream];
  const row = firstAfter(reach, rank * n, n, atS / tickS);
  if (row === n) return -1;
  const began = waitStyles[row] === NO_STYLE ? start : ready;
  return began[rank * n + row] <= atS / tickS ? row : -1;
}

/** Return the row that took time and is the next from one, `direction` 1 or -1; -1 if there is none. */
function rowBeside(timeline, { rank, trace, stream }, row, direction) {
  const { n, waitStyles } = timeline.plan.streams[stream];
  const { ready, start, end } = timeline.traces[trace].streams[stream];
  for (let at = row + direction; at >= 0 && at < n; at += direction) {
    const i = rank * n + at;
    if (end[i] > (waitStyles[at] === NO_STYLE ? start[i] : ready[i])) return at;
  }
  return -1;
}

/** Return the row of a lane that took time and is nearest to a moment, or -1. */
function rowNear(timeline, lane, atS) {
  const at = rowAt(timeline, lane, atS);
  if (at >= 0) return at;
  const { n } = timeline.plan.streams[lane.stream];
  const { tickS, streams } = timeline.traces[lane.trace];
  const after = firstAfter(streams[lane.stream].reach, lane.rank * n, n, atS / tickS);
  const next = rowBeside(timeline, lane, after - 1, 1);
  return next >= 0 ? next : rowBeside(timeline, lane, after, -1);
}

/** Return everything about an operation: what, where, and its times in seconds. */
function detailsOf(timeline, { rank, trace, stream }, row) {
  const { plan, traces } = timeline;
  const { n, ops, steps, name } = plan.streams[stream];
  const times = traces[trace].streams[stream];
  const i = rank * n + row;
  const [readyS, startS, endS] = [times.ready, times.start, times.end].map((each) => each[i] * traces[trace].tickS);
  const op = plan.ops[ops[row]];
  return {
    text: op.text,
    step: steps[row],
    rank,
    stream: name,
    trace: traces[trace].name,
    style: plan.styles[op.style].label,
    readyS,
    startS,
    endS,
    beginS: op.waitStyle >= 0 ? readyS : startS, // of what is drawn
    isWaiting: op.waitStyle >= 0,
    isHostWait: op.waitStyle === op.style,
    nbytes: op.nbytes,
    lastRanks: op.group && startS > readyS ? lastReady(times.ready, n, row, rank, op.group, plan.worldSize) : [],
  };
}

/** Return the ranks of a group that were ready last. Groups are blocks of `size * stride` ranks, or listed (see `simdist.plan.group`). */
function lastReady(ready, n, row, rank, [size, stride, listed], worldSize) {
  const place = listed.length ? listed.indexOf(rank) : rank;
  const block = place - (place % (size * stride));
  const places = Array.from({ length: size }, (_, i) => block + (place % stride) + i * stride).filter((r) => r < worldSize);
  const members = listed.length ? places.map((each) => listed[each]) : places;
  const latest = Math.max(...members.map((member) => ready[member * n + row]));
  return members.filter((member) => ready[member * n + row] === latest);
}

/** Return how exactly times are told: as the ticks of the traces allow. */
const resolutionS = ({ traces }) => Math.max(...traces.map(({ tickS }) => tickS));

/** Return the lines about an operation: names and values. */
function linesOf(timeline, details) {
  const time = (seconds) => timeText(seconds, resolutionS(timeline));
  const { readyS, startS, endS, lastRanks, nbytes } = details;
  if (details.isHostWait) return [["blocked from", time(readyS)], ["until", time(endS)], ["waited", time(endS - readyS)]];
  const lines = [["ready", time(readyS)]];
  if (details.isWaiting) {
    const forWhom = lastRanks.length ? ` for rank${lastRanks.length > 1 ? "s" : ""} ${shortList(lastRanks)}` : "";
    lines.push(["waited", time(startS - readyS) + forWhom]);
  }
  if (startS > readyS) lines.push(["began", time(startS)]);
  lines.push(["took", time(endS - startS)], ["ended", time(endS)]);
  if (nbytes !== undefined) lines.push(["buffer", bytesText(nbytes)]);
  return lines;
}

const shortList = (numbers) => numbers.slice(0, 4).join(", ") + (numbers.length > 4 ? ` and ${numbers.length - 4} more` : "");

/** Return an operation as one sentence, such as `all_reduce(grad.2) step 3 rank 5: ready 1.2 s, took 3 ms`. */
function sentenceOf(timeline, details) {
  const { text, step, rank, stream, trace } = details;
  const facts = linesOf(timeline, details).map(([name, value]) => `${name} ${value}`);
  return `${text} step ${step} rank ${rank} (${stream}, ${trace}): ${facts.join(", ")}.`;
}

/** Return the shares of the styles in the column of pixels at a place, and how many operations are in it. */
function columnAt(timeline, lane, x) {
  const { plan, traces, size } = timeline;
  const pixelS = (timeline.view.endS - timeline.view.beginS) / (size.width - size.gutter) / size.ratio;
  const column = Math.floor((momentAt(timeline, x) - timeline.view.beginS) / pixelS);
  const beginS = timeline.view.beginS + column * pixelS;
  const view = { beginS, endS: beginS + pixelS };
  const stream = plan.streams[lane.stream];
  const shares = newShares(plan.styles.length, 1);
  measureLane(shares, stream, traces[lane.trace], lane.stream, lane.rank, view);
  const { reach } = traces[lane.trace].streams[lane.stream];
  const rowOf = (seconds) => firstAfter(reach, lane.rank * stream.n, stream.n, seconds / traces[lane.trace].tickS);
  const nOps = Math.min(rowOf(view.endS), stream.n - 1) - rowOf(view.beginS) + 1;
  const ofStyles = plan.styles.map(({ label }, style) => [label, shares.ofStyles[style]]);
  const idle = 1 - ofStyles.reduce((sum, [, share]) => sum + share, 0);
  return { nOps, pixelS, shares: [...ofStyles, ["idle", idle]].filter(([, share]) => share >= 0.0005) };
}
