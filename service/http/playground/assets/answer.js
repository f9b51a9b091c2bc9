/** What was answered: weights a head, the output, and how long each stage took. */

import { aroundZero, rising } from "./colours.js";
import { byId, element, pairs } from "./dom.js";
import { heatMap, legend } from "./heatmap.js";

/**
 * @typedef {object} Shown
 * @property {import("./api.js").Answer} answer
 * @property {import("./bodies.js").Body} body that it answers
 * @property {number[]} heads whose weights these are, or the mean is of
 * @property {boolean} isMean
 */
/** @typedef {{queries: string[], keys: string[]}} Labels words, which may be more or fewer than tokens */

/**
 * Draws one entry.
 * @param {Shown} shown
 * @param {number} entry
 * @param {Labels} labels
 */
export function drawEntry(shown, entry, labels) {
  const read = (text) => byId("readout").replaceChildren(text);
  byId("timing").replaceChildren(...pairs(shown.answer.timing.map(([stage, ms]) => [stage, `${ms} ms`])));
  drawWeights(shown, entry, labels, read);
  drawOutput(shown.answer.output[entry], labels, read);
}

/**
 * What to tell once an answer is there.
 * @param {Shown} shown
 * @returns {string}
 */
export function summary({ answer, isMean, heads }) {
  const { output, weights, ms, requestId } = answer;
  const numHeads = heads.length === 1 ? "one head" : `${heads.length} heads`;
  const what = weights === undefined ? "no weights" : `${isMean ? "mean weights" : "weights"} of ${numHeads}`;
  const entries = output.length === 1 ? "1 entry" : `${output.length} entries`;
  return `Answered in ${ms.toFixed(1)} ms: ${entries}, ${what}. Request ${requestId}.`;
}

function drawWeights(shown, entry, labels, read) {
  const matrices = matricesOf(shown, entry);
  const numQueries = matrices[0]?.rows.length ?? 0;
  const numKeys = matrices[0]?.rows[0].length ?? 0;
  const validTo = validToOf(shown.body, entry, numKeys);
  const isMasked = matrices.length > 0 && matrices[0].rows.some((_, row) => validTo(row) < numKeys);
  const masks = maskText(shown.body, entry, numQueries, numKeys, validTo);
  const scale = rising(everyValue(matrices.map(({ rows }) => rows)));
  byId("weights-note").replaceChildren(matrices.length > 0 ? masks : "No weights were asked for.");
  byId("weights-scale").replaceChildren(...(matrices.length > 0 ? legend(scale, isMasked) : []));
  byId("weights").replaceChildren(...matrices.map(({ title, rows }, index) => heatMap(`weights-${index}`, {
    title,
    summary: `${numQueries} queries by ${numKeys} keys. ${masks}`,
    rows,
    validTo,
    rowLabels: labelled(labels.queries, numQueries),
    columnLabels: labelled(labels.keys, numKeys),
    describe: (row, column) =>
      `${title}, ${named("query", labels.queries, row)}, ${named("key", labels.keys, column)}` +
      `${column < validTo(row) ? "" : ", masked"}: ${rows[row][column]}`,
  }, scale, read)));
}

function drawOutput(rows, labels, read) {
  const scale = aroundZero(everyValue([rows]));
  const numFeatures = rows[0].length;
  byId("output-scale").replaceChildren(...legend(scale, false));
  byId("output").replaceChildren(heatMap("output-map", {
    title: `${rows.length} × ${numFeatures}`,
    summary: `output of ${rows.length} queries, ${numFeatures} features each.`,
    rows,
    validTo: () => numFeatures,
    rowLabels: labelled(labels.queries, rows.length),
    columnLabels: [],
    describe: (row, column) =>
      `Output, ${named("query", labels.queries, row)}, feature ${column}: ${rows[row][column]}`,
  }, scale, read));
}

// Weights of ragged entries are as large as the largest; an entry is shown without what is not its own.
function matricesOf({ answer, body, heads, isMean }, entry) {
  if (answer.weights === undefined) return [];
  const numQueries = body.shape?.numQueries[entry];
  const numKeys = body.shape?.numKeys[entry];
  const own = (rows) => rows.slice(0, numQueries).map((row) => row.slice(0, numKeys));
  if (isMean) return [{ title: `Mean of ${heads.length} heads`, rows: own(answer.weights[entry]) }];
  return answer.weights[entry].map((rows, index) => ({ title: `Head ${heads[index]}`, rows: own(rows) }));
}

// A length of 0 masks nothing: all keys count alike, by the API's contract.
function validToOf(body, entry, numKeys) {
  const lens = body.shape && body.validLens?.[entry];
  return (row) => (Array.isArray(lens) ? lens[row] : lens) || numKeys;
}

function maskText(body, entry, numQueries, numKeys, validTo) {
  if (body.shape === null) return "What is masked is not known here: the page does not read lengths from such a body.";
  const lens = body.validLens?.[entry];
  if (Array.isArray(lens)) return `Valid lengths of the queries: ${lens.join(", ")}; keys from there on are masked.`;
  if (lens === 0) return "A valid length of 0: every key has the same weight.";
  const first = validTo(0);
  if (first >= numKeys) return "No key is masked.";
  return first === numKeys - 1 ? `Key ${first} is masked.` : `Keys ${first} to ${numKeys - 1} are masked.`;
}

function labelled(words, count) {
  return Array.from({ length: count }, (_, index) => words[index] ?? String(index));
}

function named(kind, words, index) {
  return words[index] === undefined ? `${kind} ${index}` : `${kind} ${index} ${words[index]}`;
}

function* everyValue(matrices) {
  for (const rows of matrices) for (const row of rows) yield* row;
}

/**
 * Draws a refusal in the server's words, or takes the last one away.
 * @param {import("./api.js").Refusal | Error | null} error
 */
export function drawRefusal(error) {
  byId("refusal").replaceChildren();
  if (error === null) return;
  const { message, status, code: slug, requestId } = /** @type {any} */ (error);
  const facts = Object.entries({ status, code: slug, request_id: requestId }).filter(([, value]) => value);
  const code = (name, value) => element("code", { id: `refusal-${name}` }, String(value));
  const said = facts.flatMap(([name, value]) => [`${name} `, code(name, value), " "]);
  byId("refusal").append(element("p", {}, element("strong", {}, message)), element("p", {}, ...said));
}
