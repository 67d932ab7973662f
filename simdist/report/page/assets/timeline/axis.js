// The marks of the time axis: at 1, 2 or 5 times a power of ten, in the unit that suits the distance between them.

const LONGEST_MARK_DIGITS = 5;

/**
 * Return the marks of a view. Far from 0 and close together, marks count from a base near the left edge; the base is
 * shown beside them.
 *
 * @returns {{marks: {atS: number, text: string}[], base: string}}
 */
function axisMarks({ beginS, endS }, width, pixelsPerMark = 90) {
  const stepS = roundStep(((endS - beginS) * pixelsPerMark) / width);
  const first = Math.ceil(beginS / stepS - 1e-6);
  const last = Math.floor(endS / stepS + 1e-6);
  const perBase = 10 ** (LONGEST_MARK_DIGITS - 1);
  const base = Math.max(Math.abs(first), Math.abs(last)) < perBase ? 0 : Math.floor(first / 1000) * 1000;
  const [unit, size] = unitFor(Math.max(stepS, Math.min(last - base, 20) * stepS), TIME_UNITS);
  const digits = decimals(stepS, size);
  const marks = [];
  for (let mark = first; mark <= last; mark++) {
    const value = (((mark - base) * stepS) / size).toFixed(digits);
    marks.push({ atS: mark * stepS, text: `${base ? "+" : ""}${value} ${unit}` });
  }
  return { marks, base: base ? timeText(base * stepS, stepS) : "" };
}
