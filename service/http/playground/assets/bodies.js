/** Bodies of requests: what is posted, and what can be known of it before it is answered. */

import { openSafetensors } from "./safetensors.js";

/**
 * @typedef {object} Shape
 * @property {number[]} numQueries of each entry
 * @property {number[]} numKeys of each entry
 */
/**
 * @typedef {object} Body
 * @property {string} mediaType
 * @property {string} fileName under which it can be saved
 * @property {string | Blob} content exactly what is posted
 * @property {Shape | null} shape null if it is packed, or not understood here
 * @property {number[] | number[][] | null} validLens (B,) or (B, Q); null if it has none
 * @property {(lens: number[]) => Body} withValidLens the same tensors with other lengths; only where there is a shape
 */

/** @implements {Body} */
export class JsonBody {
  mediaType = "application/json";
  fileName = "body.json";

  /**
   * @param {string} content
   * @param {Record<string, any>} tensors what it says
   */
  constructor(content, tensors) {
    this.content = content;
    this.tensors = tensors;
    this.shape = shapeOf(tensors);
    this.validLens = Array.isArray(tensors.valid_lens) ? tensors.valid_lens : null;
  }

  /** @param {Record<string, any>} tensors */
  static of(tensors) {
    return new JsonBody(JSON.stringify(tensors), tensors);
  }

  /** @param {number[]} lens */
  withValidLens(lens) {
    return JsonBody.of({ ...this.tensors, valid_lens: lens });
  }
}

/**
 * The body in a file. What cannot be read here is posted all the same: the server says what is wrong with it.
 * @param {File} file
 * @returns {Promise<Body | null>} null if its name has none of the endings
 */
export async function openFile(file) {
  const name = file.name.toLowerCase();
  if (name.endsWith(".json")) return openJson(file);
  if (name.endsWith(".safetensors")) {
    return (await openSafetensors(file)) ?? opaque(file, "application/vnd.safetensors", "body.safetensors");
  }
  if (name.endsWith(".npz")) return opaque(file, "application/x-npz", "body.npz");
  return null;
}

async function openJson(file) {
  const text = await file.text();
  try {
    const tensors = JSON.parse(text);
    if (tensors !== null && typeof tensors === "object" && !Array.isArray(tensors)) return new JsonBody(text, tensors);
  } catch {
    // As said above.
  }
  return opaque(file, "application/json", "body.json");
}

/** @returns {Body} */
function opaque(content, mediaType, fileName) {
  const body = { content, mediaType, fileName, shape: null, validLens: null, withValidLens: () => body };
  return body;
}

// Packed tensors have two axes.
function shapeOf({ queries, keys }) {
  const attended = keys ?? queries;
  if (!hasRank3(queries) || !hasRank3(attended) || queries.length !== attended.length) return null;
  return { numQueries: queries.map((entry) => entry.length), numKeys: attended.map((entry) => entry.length) };
}

function hasRank3(tensor) {
  const isList = (value) => Array.isArray(value) && value.length > 0;
  return isList(tensor) && tensor.every((entry) => isList(entry) && entry.every(isList));
}
