/**
 * One matrix as a picture whose cells can be read with a pointer and with the arrow keys.
 *
 * The picture is a canvas, because a matrix may have a million cells. To assistive technology it is a grid of which
 * only the current cell is in the document, with its place in `aria-rowindex` and `aria-colindex`.
 */

import { HATCH, MASKED } from "./colours.js";
import { element } from "./dom.js";

/**
 * @typedef {object} Matrix
 * @property {string} title
 * @property {string} summary what there is to say about all of it
 * @property {number[][]} rows
 * @property {(row: number) => number} validTo cells of this row from here on are masked
 * @property {string[]} rowLabels
 * @property {string[]} columnLabels none where there are none to show
 * @property {(row: number, column: number) => string} describe one cell, with its value
 */

const MOST_PIXELS = 640;
const CELL_PIXELS = 32;
const ROW_PIXELS = 40;
const HATCHED_FROM = 6;
const MOST_ROW_LABELS = 24;
const MOST_COLUMN_LABELS = 12;
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/**
 * @param {string} id for the document, where it is the only one
 * @param {Matrix} matrix
 * @param {import("./colours.js").Scale} scale
 * @param {(text: string) => void} read called with the cell that is pointed at, or moved to
 * @returns {HTMLElement} a figure
 */
export function heatMap(id, matrix, scale, read) {
  const numRows = matrix.rows.length;
  const numColumns = matrix.rows[0].length;
  const cell = element("div", { role: "gridcell", class: "cell", hidden: true });
  const row = element("div", { role: "row" }, cell);
  const grid = element("div", {
    id, role: "grid", class: "grid", tabindex: 0, "aria-label": `${matrix.title}: ${matrix.summary}`,
    "aria-readonly": "true", "aria-rowcount": numRows, "aria-colcount": numColumns,
  }, paint(matrix, scale), row);
  grid.style.height = `${Math.min(MOST_PIXELS / 2, numRows * ROW_PIXELS)}px`;
  let at = [0, 0];

  const moveTo = (rowIndex, columnIndex) => {
    at = [clamp(rowIndex, numRows), clamp(columnIndex, numColumns)];
    const text = matrix.describe(...at);
    cell.id = `${id}-${at[0]}-${at[1]}`;
    cell.setAttribute("aria-label", text);
    cell.setAttribute("aria-colindex", String(at[1] + 1));
    row.setAttribute("aria-rowindex", String(at[0] + 1));
    cell.style.inset = `${(at[0] / numRows) * 100}% auto auto ${(at[1] / numColumns) * 100}%`;
    cell.style.width = `${100 / numColumns}%`;
    cell.style.height = `${100 / numRows}%`;
    cell.hidden = false;
    grid.setAttribute("aria-activedescendant", cell.id);
    read(text);
  };
  const leave = () => {
    cell.hidden = document.activeElement !== grid;
  };
  grid.addEventListener("focus", () => {
    if (cell.hidden) moveTo(...at);
  });
  grid.addEventListener("blur", leave);
  grid.addEventListener("pointerleave", leave);
  for (const event of ["pointermove", "pointerdown"]) {
    grid.addEventListener(event, ({ clientX, clientY }) => {
      const box = grid.getBoundingClientRect();
      moveTo(Math.floor(((clientY - box.top) / box.height) * numRows),
        Math.floor(((clientX - box.left) / box.width) * numColumns));
    });
  }
  grid.addEventListener("keydown", (event) => {
    const [down, right] = STEPS[event.key] ?? [0, { Home: -numColumns, End: numColumns }[event.key] ?? 0];
    if ((down === 0 && right === 0) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault(); // the page would scroll
    moveTo(at[0] + down, at[1] + right);
  });
  return element("figure", {}, element("figcaption", {}, matrix.title), framed(matrix, grid));
}

/**
 * What the colours mean.
 * @param {import("./colours.js").Scale} scale
 * @param {boolean} hasMasked
 * @returns {HTMLElement[]}
 */
export function legend(scale, hasMasked) {
  const said = `colours from ${scale.low} to ${scale.high}`;
  const bar = element("span", { class: "bar", role: "img", "aria-label": said });
  bar.style.background = scale.gradient;
  const parts = [element("span", {}, String(scale.low)), bar, element("span", {}, String(scale.high))];
  if (!hasMasked) return parts;
  const swatch = element("span", { class: "masked", "aria-hidden": "true" });
  swatch.style.background = `repeating-linear-gradient(-45deg, rgb(${MASKED}) 0 4px, rgb(${HATCH}) 4px 5px)`;
  return [...parts, swatch, element("span", {}, "beyond the valid length")];
}

function framed(matrix, grid) {
  const rows = labels("rows", matrix.rowLabels, MOST_ROW_LABELS, "gridTemplateRows");
  const columns = labels("columns", matrix.columnLabels, MOST_COLUMN_LABELS, "gridTemplateColumns");
  if (matrix.columnLabels.some((label) => label.length > 3)) columns.classList.add("words");
  return element("div", { class: "map" }, rows, grid, columns);
}

// Where there is no room for all labels every second, third or so is shown, at the start of its stretch. Cells say
// theirs, so these are for the eye.
function labels(name, texts, most, template) {
  const step = Math.ceil(texts.length / most) || 1;
  const shown = texts.filter((_, index) => index % step === 0);
  const spans = shown.map((text) => element("span", { title: text }, text));
  const list = element("div", { class: name, "aria-hidden": "true" }, ...spans);
  list.classList.toggle("sparse", step > 1);
  const tracks = shown.map((_, index) => `minmax(0, ${Math.min(step, texts.length - index * step)}fr)`);
  list.style[template] = tracks.join(" ");
  return list;
}

function paint(matrix, scale) {
  const numRows = matrix.rows.length;
  const numColumns = matrix.rows[0].length;
  const side = clamp(Math.floor(MOST_PIXELS / Math.max(numRows, numColumns)), CELL_PIXELS + 1) || 1;
  const canvas = /** @type {HTMLCanvasElement} */ (element("canvas", { "aria-hidden": "true" }));
  canvas.width = numColumns * side;
  canvas.height = numRows * side;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(onePixelEach(matrix, scale, numRows, numColumns), 0, 0, canvas.width, canvas.height);
  if (side >= HATCHED_FROM) {
    context.fillStyle = context.createPattern(hatch(), "repeat");
    matrix.rows.forEach((_, row) => {
      const from = matrix.validTo(row) * side;
      context.fillRect(from, row * side, canvas.width - from, side);
    });
  }
  return canvas;
}

function onePixelEach(matrix, scale, numRows, numColumns) {
  const image = new ImageData(numColumns, numRows);
  let at = 0;
  matrix.rows.forEach((values, row) => {
    const validTo = matrix.validTo(row);
    values.forEach((value, column) => {
      image.data.set([...(column < validTo ? scale.at(value) : MASKED), 255], at);
      at += 4;
    });
  });
  const canvas = new OffscreenCanvas(numColumns, numRows);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function hatch() {
  const canvas = new OffscreenCanvas(8, 8);
  const context = canvas.getContext("2d");
  context.strokeStyle = `rgb(${HATCH})`;
  for (const shift of [-8, 0, 8]) {
    context.moveTo(shift, 8);
    context.lineTo(shift + 8, 0);
  }
  context.stroke();
  return canvas;
}

function clamp(index, count) {
  return Math.min(Math.max(index, 0), count - 1);
}
