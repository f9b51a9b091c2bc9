/** What the page asks the server for. Every path is relative, so that a prefix before the server changes nothing. */

/**
 * One version of a model, as `GET /v1/models/{name}` has it.
 * @typedef {{name: string, version: number, layer: Layer, precision: string, device: string,
 *   limits: Record<string, number>, parity: {max_error: number}}} Model
 */
/**
 * @typedef {{num_hiddens: number, num_heads: number, head_size: number, query_size: number, key_size: number,
 *   value_size: number, bias: boolean, scoring: string}} Layer
 */
/**
 * What `POST /v1/attention` answered.
 * @typedef {object} Answer
 * @property {number[][][]} output entries of queries of features
 * @property {number[][][][] | number[][][] | undefined} weights (B, heads, Q, K), or (B, Q, K) for the mean
 * @property {[string, number][]} timing stages of the server, in milliseconds
 * @property {number} ms from asking to having read the answer
 * @property {string} requestId
 */

/** An answer that is not 2xx, in the API's own words. */
export class Refusal extends Error {
  /**
   * @param {number} status
   * @param {{error: string, code: string, request_id: string}} body
   */
  constructor(status, body) {
    super(body.error);
    this.status = status;
    this.code = body.code;
    this.requestId = body.request_id;
  }
}

/**
 * Every version of every model, each model's newest first.
 * @returns {Promise<Model[]>}
 * @throws {Refusal}
 */
export async function listModels() {
  const { models } = await (await ask("v1/models")).json();
  const lists = await Promise.all(models.map(({ name }) => ask(`v1/models/${encodeURIComponent(name)}`)));
  const all = await Promise.all(lists.map((list) => list.json()));
  return all.flatMap(({ versions }) => versions.toReversed());
}

/**
 * The address of one request for attention.
 * @param {Model} model
 * @param {{heads: number[], isMean: boolean}} wanted whose weights; of none where there are no heads
 * @returns {string}
 */
export function attentionUrl(model, { heads, isMean }) {
  const url = new URL("v1/attention", document.baseURI);
  url.searchParams.set("model", model.name);
  url.searchParams.set("version", String(model.version));
  const areAll = heads.length === model.layer.num_heads;
  if (heads.length > 0 && (isMean || areAll)) url.searchParams.set("need_weights", isMean ? "mean" : "true");
  const chosen = heads.length > 0 && !areAll ? `&heads=${heads.join(",")}` : "";
  return url.href + chosen; // a comma stays one, as people write it
}

/**
 * @param {string} url
 * @param {import("./bodies.js").Body} body
 * @param {string} key sent where it is not empty
 * @returns {Promise<Answer>}
 * @throws {Refusal}
 */
export async function attend(url, body, key) {
  const headers = { "Content-Type": body.mediaType, Accept: "application/json", ...(key && { "X-API-Key": key }) };
  const began = performance.now();
  const response = await ask(url, { method: "POST", headers, body: body.content });
  const { output, weights } = await response.json();
  const timing = readTiming(response.headers.get("Server-Timing") ?? "");
  const requestId = response.headers.get("X-Request-Id") ?? "";
  return { output, weights, timing, ms: performance.now() - began, requestId };
}

/**
 * What Prometheus would read.
 * @returns {Promise<string>}
 * @throws {Refusal}
 */
export async function readMetrics() {
  return (await ask("metrics")).text();
}

async function ask(url, options = {}) {
  const response = await fetch(url, { cache: "no-store", ...options }).catch(({ message }) => {
    throw new Error(`no answer: ${message}`);
  });
  if (response.ok) return response;
  const text = await response.text();
  throw new Refusal(response.status, errorBody(text) ?? { error: text.slice(0, 500), code: "", request_id: "" });
}

// What is no error body of the API comes from something in between, such as a proxy.
function errorBody(text) {
  try {
    const body = JSON.parse(text);
    return typeof body?.error === "string" ? body : null;
  } catch {
    return null;
  }
}

function readTiming(header) {
  return Array.from(header.matchAll(/([\w-]+);dur=([\d.]+)/g), ([, stage, ms]) => [stage, Number(ms)]);
}
