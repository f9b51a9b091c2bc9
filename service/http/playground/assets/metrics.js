/** Prometheus' text format, and what the page makes of it. */

/** @typedef {{name: string, labels: Record<string, string>, value: number}} Sample */
/**
 * @typedef {object} Figures
 * @property {number} answered since the server started
 * @property {number} refused since the server started
 * @property {number} inFlight requests, without the one that asked for this
 * @property {number} waiting requests
 * @property {number} rate answers a second
 * @property {number | null} medianMs null where nothing was answered
 * @property {number | null} saved part of the received keys that was never computed
 */

/**
 * Every sample of an exposition.
 * @param {string} text
 * @returns {Sample[]}
 */
export function parseMetrics(text) {
  const lines = text.matchAll(/^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/gm);
  return Array.from(lines, ([, name, labels = "", value]) =>
    ({ name, labels: parseLabels(labels), value: readNumber(value) }));
}

/**
 * @param {Sample[]} now
 * @param {Sample[]} before the same server's, earlier
 * @param {number} seconds between the two
 * @returns {Figures}
 */
export function figures(now, before, seconds) {
  const answered = sum(now, "mha_requests_total", isAnswered);
  const keys = (kind) => sum(now, "mha_keys_total", ({ kind: one }) => one === kind);
  return {
    answered,
    refused: sum(now, "mha_requests_total", isInference) - answered,
    inFlight: Math.max(0, sum(now, "mha_requests_in_flight") - 1),
    waiting: sum(now, "mha_queue_requests"),
    rate: seconds > 0 ? (answered - sum(before, "mha_requests_total", isAnswered)) / seconds : 0,
    medianMs: median(cumulative(now), cumulative(before)),
    saved: keys("received") > 0 ? Math.max(0, 1 - keys("computed") / keys("received")) : null,
  };
}

const isInference = ({ route = "" }) => route === "/v1/attention" || route.endsWith("/infer");
const isAnswered = (labels) => isInference(labels) && labels.code === "ok";

function sum(samples, name, holds = (_labels) => true) {
  return samples.reduce((total, one) => (one.name === name && holds(one.labels) ? total + one.value : total), 0);
}

// Requests by the upper bound of their bucket, in seconds.
function cumulative(samples) {
  const counts = new Map();
  for (const { name, labels, value } of samples) {
    if (name !== "mha_request_seconds_bucket" || !isInference(labels)) continue;
    const bound = readNumber(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return counts;
}

// As Prometheus' histogram_quantile: evenly within the bucket that holds it.
function median(now, before) {
  const bounds = [...now.keys()].sort((one, other) => one - other);
  const grown = bounds.map((bound) => now.get(bound) - (before.get(bound) ?? 0));
  const middle = (grown.at(-1) ?? 0) / 2;
  if (middle === 0) return null;
  const index = grown.findIndex((count) => count >= middle);
  const [below, from] = index > 0 ? [grown[index - 1], bounds[index - 1]] : [0, 0];
  if (bounds[index] === Infinity) return from * 1000;
  return (from + ((middle - below) / (grown[index] - below)) * (bounds[index] - from)) * 1000;
}

function parseLabels(text) {
  const unescaped = (value) => value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
  const labels = text.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g);
  return Object.fromEntries(Array.from(labels, ([, name, value]) => [name, unescaped(value)]));
}

function readNumber(text) {
  return text === "+Inf" ? Infinity : Number(text);
}
