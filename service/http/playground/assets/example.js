/** The example to run at once: the book's shapes, with values that let heads differ. */

const NUM_QUERIES = 4;
const NUM_KEYS = 6;
const VALID_LENS = [3, 2];

/**
 * Tensors for a layer, the same for the same seed.
 * @param {import("./api.js").Layer} layer
 * @param {{seed: number, isSelf: boolean}} choice
 * @returns {{queries: number[][][], keys?: number[][][], values?: number[][][], valid_lens: number[]}}
 */
export function makeExample(layer, { seed, isSelf }) {
  const next = generator(seed);
  const tensor = (rows, size) =>
    VALID_LENS.map(() => Array.from({ length: rows }, () => Array.from({ length: size }, () => number(next))));
  const queries = tensor(NUM_QUERIES, layer.query_size);
  if (isSelf) return { queries, valid_lens: VALID_LENS };
  const keys = tensor(NUM_KEYS, layer.key_size);
  // Where their sizes agree the values are the keys, as in the book.
  if (layer.key_size === layer.value_size) return { queries, keys, valid_lens: VALID_LENS };
  return { queries, keys, values: tensor(NUM_KEYS, layer.value_size), valid_lens: VALID_LENS };
}

/**
 * Whether the layer can attend to its own queries.
 * @param {import("./api.js").Layer} layer
 */
export function allowsSelf(layer) {
  return layer.query_size === layer.key_size && layer.key_size === layer.value_size;
}

// Evenly from -3 to 3, with two decimals: wide enough for weights that are far from uniform, short enough to be read.
function number(next) {
  return Math.round((next() * 6 - 3) * 100) / 100;
}

// mulberry32 (Tommy Ettinger, public domain): 32 bits of state, numbers in [0, 1).
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
