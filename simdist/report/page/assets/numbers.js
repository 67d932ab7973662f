/* Numbers with units for people, and round steps of axes: of all scripts of all pages. */

const TIME_UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9], ["ps", 1e-12]];

/* Return the largest unit of which a number is at least one, and the unit's size. */
function unitFor(value, units) {
  return units.find(([, size]) => Math.abs(value) >= size * (1 - 1e-9)) ?? units.at(-1);
}

/* Return the smallest of 1, 2, 5, 10, 20 ... that is at least `least`, or of 0.1, 0.2, 0.5 ... */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

const numbersAsWritten = (value, digits) => String(Number(value.toPrecision(digits)));

/* Return a time as the tables of a page write it: rounded before the unit is chosen, as 999.6 us are 1 ms. */
function secondsText(seconds, digits = 3) {
  if (Math.abs(seconds) < 1e-12) return "0 s";
  const rounded = Math.abs(Number(seconds.toPrecision(digits)));
  const [unit, size] = unitFor(Math.max(rounded, 1e-9), TIME_UNITS);
  const value = seconds / size;
  return `${value >= 10 ** digits ? value.toFixed(0) : numbersAsWritten(value, digits)} ${unit}`;
}
