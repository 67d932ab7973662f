// The time in view. Functions return a new view; none leaves the limits.

const LEAST_TICKS = 20;

/** Return a view as close to one as the limits allow: no longer than they, no shorter than some ticks, and inside. */
function within({ beginS, endS }, { firstS, lastS, leastS }) {
  const lengthS = Math.min(Math.max(endS - beginS, leastS), lastS - firstS);
  const middleS = (beginS + endS) / 2;
  const atS = endS - beginS === lengthS ? beginS : middleS - lengthS / 2;
  const inside = Math.min(Math.max(atS, firstS), lastS - lengthS);
  return { beginS: inside, endS: inside + lengthS };
}

/** Zoom by a factor, above 1 to see more detail, so that a moment stays where it is. */
function zoomed({ beginS, endS }, limits, factor, atS) {
  const lengthS = Math.min(Math.max((endS - beginS) / factor, limits.leastS), limits.lastS - limits.firstS);
  const share = (atS - beginS) / (endS - beginS);
  const fromS = atS - share * lengthS;
  return within({ beginS: fromS, endS: fromS + lengthS }, limits);
}

function panned({ beginS, endS }, limits, byS) {
  return within({ beginS: beginS + byS, endS: endS + byS }, limits);
}

/**
 * Return the limits of some traces: all of their time, from `firstS`. The first of the steps that are shown began at
 * `beganS`; before it there may be loads that were ahead.
 */
function limitsOf(traces) {
  const firstS = Math.min(...traces.map((trace) => trace.firstS));
  const longest = Math.max(...traces.map((trace) => trace.lastS)) - firstS;
  const finestS = Math.min(...traces.map((trace) => trace.tickS));
  const beganS = Math.min(...traces.map((trace) => trace.beganS));
  return { firstS, beganS, lastS: firstS + (longest > 0 ? longest : 1), leastS: LEAST_TICKS * finestS };
}

/** Return the view of all steps that are shown. */
const whole = ({ beganS, lastS }) => ({ beginS: beganS, endS: lastS });

/** Return the time in which the ranks run a step, from the first that begins to the last that ends, and some around. */
function viewOfStep(step, { traces, plan }, { ranks, shown }, limits) {
  let [beginS, endS] = [Infinity, -Infinity];
  for (const number of shown) {
    const { stepEnd, tickS } = traces[number];
    for (const rank of ranks) {
      beginS = Math.min(beginS, step ? stepEnd[(step - 1) * plan.worldSize + rank] * tickS : 0);
      endS = Math.max(endS, stepEnd[step * plan.worldSize + rank] * tickS);
    }
  }
  const marginS = 0.03 * (endS - beginS);
  const around = { beginS: Math.max(beginS - marginS, limits.firstS), endS: Math.min(endS + marginS, limits.lastS) };
  return within(around, limits);
}

/** Return the first and the last of the steps that are shown which a rank runs in a view. */
function stepsIn({ beginS, endS }, trace, { worldSize, firstStep, lastStep }, rank) {
  const stepAt = (seconds) => {
    let [low, high] = [firstStep, lastStep];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (trace.stepEnd[middle * worldSize + rank] * trace.tickS > seconds) high = middle;
      else low = middle + 1;
    }
    return low;
  };
  return [stepAt(beginS), stepAt(endS)];
}
