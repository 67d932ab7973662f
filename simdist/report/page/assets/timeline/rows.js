// Where lanes are. A band per rank; in it the lanes of a trace, and below them those of another; a lane per stream.
// Lanes have numbers from top to bottom. Lengths are in CSS pixels, from the top of the first band.

const TRACE_GAP = 3;

/**
 * Lay out the lanes.
 *
 * @param {{ranks: number[], shown: number[], streams: number[], laneHeight: number}} choice What is shown: ranks, and
 *   numbers of traces and streams.
 */
function layoutOf({ ranks, shown, streams, laneHeight }) {
  const traceHeight = streams.length * laneHeight;
  const gap = laneHeight < 6 ? 2 : 6;
  const bandHeight = shown.length * (traceHeight + TRACE_GAP) - TRACE_GAP + gap;
  const nLanesOfBand = shown.length * streams.length;
  return {
    ranks,
    shown,
    streams,
    laneHeight,
    traceHeight,
    gap,
    bandHeight,
    height: ranks.length * bandHeight,
    nLanesOfBand,
    nLanes: ranks.length * nLanesOfBand,
  };
}

/** Return what a lane shows and where it is. */
function laneOf(layout, number) {
  const band = Math.floor(number / layout.nLanesOfBand);
  const inBand = number % layout.nLanesOfBand;
  const row = Math.floor(inBand / layout.streams.length);
  const column = inBand % layout.streams.length;
  return {
    rank: layout.ranks[band],
    trace: layout.shown[row],
    stream: layout.streams[column],
    top: topOf(layout, band, row) + column * layout.laneHeight,
  };
}

/** Return where the lanes of a trace begin in a band; `row` 0 is the upper trace. */
function topOf(layout, band, row = 0) {
  return band * layout.bandHeight + layout.gap / 2 + row * (layout.traceHeight + TRACE_GAP);
}

/** Return the number of the lane at a height, or -1. */
function laneAt(layout, y) {
  const band = Math.floor(y / layout.bandHeight);
  if (!(band >= 0 && band < layout.ranks.length)) return -1;
  const inBand = y - topOf(layout, band);
  const row = Math.floor(inBand / (layout.traceHeight + TRACE_GAP));
  const column = Math.floor((inBand - row * (layout.traceHeight + TRACE_GAP)) / layout.laneHeight);
  if (row < 0 || row >= layout.shown.length || column >= layout.streams.length) return -1;
  return band * layout.nLanesOfBand + row * layout.streams.length + column;
}

/** Return the number of the lane of a rank, trace and stream, or -1 if it is not shown. */
function laneNumber(layout, { rank, trace, stream }) {
  const [band, row, column] = [layout.ranks.indexOf(rank), layout.shown.indexOf(trace), layout.streams.indexOf(stream)];
  if (band < 0 || row < 0 || column < 0) return -1;
  return band * layout.nLanesOfBand + row * layout.streams.length + column;
}

/** Return the first and last band that can be seen between two heights. */
function bandsBetween(layout, top, bottom) {
  const last = Math.min(layout.ranks.length - 1, Math.floor(bottom / layout.bandHeight));
  return [Math.max(0, Math.floor(top / layout.bandHeight)), last];
}
