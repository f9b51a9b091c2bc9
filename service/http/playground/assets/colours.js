/** Colour scales. Their lightness rises or falls evenly, so they can be read without telling colours apart. */

/**
 * @typedef {object} Scale
 * @property {number} low
 * @property {number} high
 * @property {(value: number) => number[]} at red, green and blue, 0 to 255
 * @property {string} gradient CSS, from low to high
 */

/** Of a cell beyond the valid length: darker than any value, and hatched where there is room. */
export const MASKED = [32, 34, 38];
export const HATCH = [78, 84, 94];

// ColorBrewer's OrRd and RdBu (Cynthia Brewer, Apache-2.0).
const RISING = [[255, 247, 236], [253, 212, 158], [252, 141, 89], [215, 48, 31], [127, 0, 0]];
const AROUND_ZERO = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];

/**
 * From 0 to the largest of the values.
 * @param {Iterable<number>} values
 * @returns {Scale}
 */
export function rising(values) {
  return scale(0, largest(values), RISING);
}

/**
 * From minus to plus the largest absolute value; 0 is white.
 * @param {Iterable<number>} values
 * @returns {Scale}
 */
export function aroundZero(values) {
  const most = largest(values);
  return scale(-most, most, AROUND_ZERO);
}

function scale(low, high, stops) {
  const at = (value) => {
    const place = Math.min(Math.max((value - low) / (high - low), 0), 1) * (stops.length - 1);
    const left = Math.min(Math.floor(place), stops.length - 2);
    return stops[left].map((part, index) => Math.round(part + (place - left) * (stops[left + 1][index] - part)));
  };
  return { low, high, at, gradient: `linear-gradient(to right, ${stops.map((stop) => `rgb(${stop})`).join(", ")})` };
}

function largest(values) {
  let most = 0;
  for (const value of values) most = Math.max(most, Math.abs(value));
  return most || 1; // all zero: any scale shows it
}
