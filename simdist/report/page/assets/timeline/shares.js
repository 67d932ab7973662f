// How much of the time of each column of pixels a lane spends in each style. This is the level of detail: a column shows
// all that is in it, and what is too short for a pixel still counts with its share. Blocks of rows that lie in a single
// column are added as a whole, so that a lane costs little more than its columns, however much it holds.

const BLOCK = 16; // rows of a lane whose ticks in each style are summed once
const LEAST_EDGE = 4; // columns that a span takes at least if its beginning is marked
const LEAST_LABEL = 30;

/** Return the first row of a lane that ends after a tick, or `n`. */
function firstAfter(reach, offset, n, tick) {
  let [low, high] = [0, n];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (reach[offset + middle] > tick) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Make room for the shares of a lane, and for what is marked in it. */
function newShares(nStyles, width) {
  return { width, ofStyles: new Float32Array(nStyles * width), edges: new Uint8Array(width), labels: [] };
}

/** Sum the ticks that each whole block of a lane spends in each style: `[rank][block][style]`, flat. */
function sumBlocks({ n, styles, waitStyles }, { ready, start, end, reach }, worldSize, nStyles) {
  const nBlocks = Math.floor(n / BLOCK);
  const sums = new Int32Array(worldSize * nBlocks * nStyles);
  for (let rank = 0; rank < worldSize; rank++) {
    for (let row = 0; row < nBlocks * BLOCK; row++) {
      const i = rank * n + row;
      const base = (rank * nBlocks + Math.floor(row / BLOCK)) * nStyles;
      const before = row ? reach[i - 1] : -Infinity;
      const began = Math.max(start[i], before);
      if (waitStyles[row] !== NO_STYLE) sums[base + waitStyles[row]] += Math.max(began - Math.max(ready[i], before), 0);
      if (end[i] > began) sums[base + styles[row]] += end[i] - began;
    }
  }
  return { nBlocks, nStyles, sums };
}

/**
 * Find the shares of a lane: `ofStyles[style * width + column]`, from 0 to 1; what is left of 1 is idle. `edges` tells
 * in which columns wide spans begin, `labels` lists spans with room for text.
 */
function measureLane(shares, stream, trace, streamNumber, rank, view) {
  shares.ofStyles.fill(0);
  shares.edges.fill(0);
  shares.labels.length = 0;
  const { ready, start, end, reach, blocks } = trace.streams[streamNumber];
  const { n, styles, waitStyles } = stream;
  const firstTick = view.beginS / trace.tickS;
  const lastTick = view.endS / trace.tickS;
  const scale = shares.width / (lastTick - firstTick);
  const offset = rank * n;
  for (let row = firstAfter(reach, offset, n, firstTick); row < n; row++) {
    const i = offset + row;
    if (ready[i] >= lastTick) break;
    const before = row ? reach[i - 1] : -Infinity;
    if (row % BLOCK === 0 && row + BLOCK <= n) {
      const from = (Math.max(ready[i], before) - firstTick) * scale;
      const to = (reach[i + BLOCK - 1] - firstTick) * scale;
      if (from >= 0 && to < shares.width && (from | 0) === (to | 0)) {
        addBlock(shares, blocks, rank * blocks.nBlocks + row / BLOCK, from | 0, scale);
        row += BLOCK - 1;
        continue;
      }
    }
    const began = Math.max(start[i], before);
    const from = (began - firstTick) * scale;
    if (waitStyles[row] !== NO_STYLE) {
      addSpan(shares, row, waitStyles[row], (Math.max(ready[i], before) - firstTick) * scale, from);
    }
    addSpan(shares, row, styles[row], from, (end[i] - firstTick) * scale);
  }
}

function addBlock({ ofStyles, width }, { sums, nStyles }, block, column, scale) {
  for (let style = 0; style < nStyles; style++) ofStyles[style * width + column] += sums[block * nStyles + style] * scale;
}

/** Add a span between two columns; they may lie outside. */
function addSpan(shares, row, style, from, to) {
  if (!(to > from) || to <= 0 || from >= shares.width) return;
  if (to - from >= LEAST_EDGE) {
    if (from >= 0) shares.edges[from | 0] = 1;
    if (to - from >= LEAST_LABEL) shares.labels.push({ row, style, from, to });
  }
  addShares(shares.ofStyles, style * shares.width, shares.width, Math.max(from, 0), Math.min(to, shares.width));
}

function addShares(ofStyles, base, width, from, to) {
  const [first, last] = [from | 0, to | 0];
  if (first === last) {
    ofStyles[base + first] += to - from;
    return;
  }
  ofStyles[base + first] += first + 1 - from;
  for (let column = first + 1; column < last; column++) ofStyles[base + column] = 1;
  if (last < width) ofStyles[base + last] += to - last;
}
