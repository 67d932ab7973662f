// Numbers with units, for people.

const BYTE_UNITS = [
  ["GB", 1e9],
  ["MB", 1e6],
  ["kB", 1e3],
  ["B", 1],
];

/** Return how many decimals show a unit down to a resolution in the same quantity. */
function decimals(resolution, unitSize) {
  return Math.min(12, Math.max(0, Math.ceil(-Math.log10(resolution / unitSize) - 1e-9)));
}

/** Return a time as text, such as `12.345 ms`, right to `resolutionS` seconds. */
function timeText(seconds, resolutionS) {
  if (Math.abs(seconds) < resolutionS / 2) return "0 s";
  const [unit, size] = unitFor(seconds, TIME_UNITS);
  const digits = (seconds / size).toFixed(decimals(resolutionS, size));
  return `${digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits} ${unit}`;
}

function bytesText(nbytes) {
  const [unit, size] = unitFor(nbytes, BYTE_UNITS);
  return `${Number((nbytes / size).toPrecision(3))} ${unit}`;
}

const percentText = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
