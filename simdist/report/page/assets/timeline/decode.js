// From the text of the page to typed arrays. The format is described in simdist/report/page/packing.py.

const DID_NOT_RUN = 0xffffffff;
const NO_STYLE = 255;

/** Read what a timeline element says of its plan and traces. */
function readRecord(root) {
  return JSON.parse(root.querySelector('script[type="application/json"]').textContent);
}

/** Read the traces of a timeline element. */
async function readTraces(root, plan) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot unpack it (no DecompressionStream); Chrome 80, Firefox 113 and Safari 16.4 can");
  }
  const packed = [...root.querySelectorAll('script[type="application/octet-stream"]')];
  const traces = [];
  for (const [number, about] of plan.traces.entries()) {
    traces.push(traceOf(plan, about, await inflated(packed[number].textContent)));
  }
  return traces;
}

/** Unpack base64 of a zlib stream. */
async function inflated(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Add to the record of a plan what stands in which row: `streams[s]` has the op and the step of each of its rows. */
function planOf(record) {
  const streams = record.streams.map((name) => ({ name, ops: [], steps: [] }));
  let step = 0;
  for (const run of record.order) {
    for (let time = 0; time < run.times; time++) {
      for (const body of run.bodies) {
        for (const op of record.bodies[body]) {
          const stream = streams[record.ops[op].stream];
          stream.ops.push(op);
          stream.steps.push(step);
        }
        step++;
      }
    }
  }
  return { ...record, nSteps: step, streams: streams.map((stream) => streamOf(stream, record.ops)) };
}

function streamOf({ name, ops, steps }, records) {
  const style = (number) => (number < 0 ? NO_STYLE : number);
  return {
    name,
    n: ops.length,
    ops: Int32Array.from(ops),
    steps: Int32Array.from(steps),
    styles: Uint8Array.from(ops, (op) => style(records[op].style)),
    waitStyles: Uint8Array.from(ops, (op) => style(records[op].waitStyle)),
  };
}

/** Unpack the times of a trace, in ticks; those of a lane, a stream of a rank, follow one another. */
function traceOf(plan, { name, source, tickS, begin }, bytes) {
  const nTimes = bytes.length / 12;
  const number = (table, i) => {
    const low = table * nTimes * 4 + i;
    return (
      (bytes[low] | (bytes[low + nTimes] << 8) | (bytes[low + 2 * nTimes] << 16) | (bytes[low + 3 * nTimes] << 24)) >>> 0
    );
  };
  let nBefore = 0;
  const streams = plan.streams.map((stream) => {
    const times = timesOf(stream.n, plan.worldSize, nBefore, number);
    nBefore += stream.n * plan.worldSize;
    return { ...times, blocks: sumBlocks(stream, times, plan.worldSize, plan.styles.length) };
  });
  const stepEnd = stepEnds(plan, streams, begin);
  const lastS = streams.reduce((last, each) => Math.max(last, highest(each.reach)), 0) * tickS;
  const began = plan.firstStep ? lowest(begin, Infinity) : 0;
  const first = streams.reduce((least, each) => Math.min(least, earliest(each)), began);
  const beganS = (plan.firstStep ? began : first) * tickS;
  return { name, source, tickS, streams, stepEnd, firstS: first * tickS, beganS, lastS };
}

const unfolded = (n) => (n & 1 ? -((n + 1) / 2) : n / 2);
const highest = (array) => array.reduce((most, each) => Math.max(most, each), 0);
const lowest = (array, most) => array.reduce((least, each) => Math.min(least, each), most);
const earliest = ({ ready, ran }) => ready.reduce((least, each, i) => (ran[i] ? Math.min(least, each) : least), Infinity);

/**
 * Return ready, start and end of a stream on all ranks, at `rank * n + row`, and which of them ran. One that did not
 * run takes no time at the end of the one before it. `reach` is the latest end so far in the lane: the ends themselves,
 * but where corrected clocks put an operation before the end of the one before.
 */
function timesOf(n, worldSize, first, number) {
  const [ready, start, end] = [0, 1, 2].map(() => new Int32Array(n * worldSize));
  const ran = new Uint8Array(n * worldSize);
  let inOrder = true;
  for (let rank = 0; rank < worldSize; rank++) {
    let before = 0;
    for (let row = 0, i = rank * n; row < n; row++, i++) {
      const packed = first + row * worldSize + rank;
      const took = number(2, packed);
      if (took === DID_NOT_RUN) {
        ready[i] = start[i] = end[i] = before;
        continue;
      }
      ran[i] = 1;
      ready[i] = before + unfolded(number(0, packed));
      start[i] = ready[i] + unfolded(number(1, packed));
      end[i] = start[i] + unfolded(took);
      inOrder &&= end[i] >= before;
      before = end[i];
    }
  }
  return { ready, start, end, ran, reach: inOrder ? end : furthest(end, n) };
}

/** Return the running maximum of each lane. */
function furthest(end, n) {
  const reach = Int32Array.from(end);
  for (let i = 1; i < reach.length; i++) {
    if (i % n) reach[i] = Math.max(reach[i], reach[i - 1]);
  }
  return reach;
}

/**
 * Return when each rank was done with each step and all before it, at `step * worldSize + rank`; io does not count.
 * `begin` tells it of the last step before those that are shown; what ended earlier is not known, and 0.
 */
function stepEnds(plan, streams, begin) {
  const { nSteps, worldSize, firstStep } = plan;
  const ends = new Int32Array(nSteps * worldSize);
  ends.set(begin, Math.max(firstStep - 1, 0) * worldSize);
  for (const [number, { n, name, steps }] of plan.streams.entries()) {
    if (name === "io" || name === "save") continue;
    const { end, ran } = streams[number];
    for (let rank = 0; rank < worldSize; rank++) {
      for (let row = 0, i = rank * n; row < n; row++, i++) {
        const at = steps[row] * worldSize + rank;
        if (ran[i] && end[i] > ends[at]) ends[at] = end[i];
      }
    }
  }
  for (let at = worldSize; at < ends.length; at++) ends[at] = Math.max(ends[at], ends[at - worldSize]);
  return ends;
}
