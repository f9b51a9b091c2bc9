/**
 * Safetensors, as far as the page needs it: shapes and valid lengths are read, and lengths replaced.
 *
 * Format: 8 bytes of little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, the data.
 * Data is never read into memory, only sliced.
 */

const LENGTH_BYTES = 8;
const LONGEST_HEADER = 64 * 1024; // the service reads no longer one
const INTEGERS = {
  I8: (view, at) => view.getInt8(at),
  U8: (view, at) => view.getUint8(at),
  I16: (view, at) => view.getInt16(at, true),
  U16: (view, at) => view.getUint16(at, true),
  I32: (view, at) => view.getInt32(at, true),
  U32: (view, at) => view.getUint32(at, true),
  I64: (view, at) => Number(view.getBigInt64(at, true)),
  U64: (view, at) => Number(view.getBigUint64(at, true)),
};

/**
 * The body in a file.
 * @param {Blob} file
 * @returns {Promise<import("./bodies.js").Body | null>} null if it is not understood
 */
export async function openSafetensors(file) {
  try {
    const start = LENGTH_BYTES + (await headerLength(file));
    const header = JSON.parse(await file.slice(LENGTH_BYTES, start).text());
    const data = file.slice(start);
    return new SafetensorsBody(file, header, data, await readLens(header.valid_lens, data));
  } catch {
    return null;
  }
}

/** @implements {import("./bodies.js").Body} */
class SafetensorsBody {
  mediaType = "application/vnd.safetensors";
  fileName = "body.safetensors";

  constructor(content, header, data, validLens) {
    this.content = content;
    this.header = header;
    this.data = data;
    this.shape = shapeOf(header);
    this.validLens = validLens;
  }

  /** @param {number[]} lens */
  withValidLens(lens) {
    const tensors = Object.entries(this.header).filter(([name]) => name !== "valid_lens" && name !== "__metadata__");
    const bytes = new DataView(new ArrayBuffer(8 * lens.length));
    lens.forEach((length, index) => bytes.setBigInt64(8 * index, BigInt(length), true));
    const header = { valid_lens: { dtype: "I64", shape: [lens.length], data_offsets: [0, bytes.byteLength] } };
    const parts = [bytes];
    let end = bytes.byteLength;
    for (const [name, { dtype, shape, data_offsets: [from, to] }] of tensors) {
      header[name] = { dtype, shape, data_offsets: [end, end + to - from] };
      parts.push(this.data.slice(from, to));
      end += to - from;
    }
    const data = new Blob(parts);
    return new SafetensorsBody(new Blob([headerBytes(header), data]), header, data, lens);
  }
}

async function headerLength(file) {
  const view = new DataView(await file.slice(0, LENGTH_BYTES).arrayBuffer());
  const length = Number(view.getBigUint64(0, true));
  if (length > LONGEST_HEADER) throw new RangeError("header");
  return length;
}

function headerBytes(header) {
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padded = new Uint8Array(LENGTH_BYTES + Math.ceil(text.length / 8) * 8).fill(0x20);
  new DataView(padded.buffer).setBigUint64(0, BigInt(padded.length - LENGTH_BYTES), true);
  padded.set(text, LENGTH_BYTES);
  return padded;
}

async function readLens(entry, data) {
  if (entry === undefined) return null;
  const read = INTEGERS[entry.dtype];
  const view = new DataView(await data.slice(...entry.data_offsets).arrayBuffer());
  const [batch, perQuery] = entry.shape;
  const size = view.byteLength / (batch * (perQuery ?? 1));
  const flat = Array.from({ length: view.byteLength / size }, (_, index) => read(view, index * size));
  if (perQuery === undefined) return flat;
  return Array.from({ length: batch }, (_, index) => flat.slice(index * perQuery, (index + 1) * perQuery));
}

// Packed tensors have two axes.
function shapeOf(header) {
  const queries = header.queries?.shape ?? [];
  const attended = header.keys?.shape ?? queries;
  if (queries.length !== 3 || attended.length !== 3 || queries[0] !== attended[0]) return null;
  const [batch, numQueries] = queries;
  return { numQueries: Array(batch).fill(numQueries), numKeys: Array(batch).fill(attended[1]) };
}
