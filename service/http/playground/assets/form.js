/** The request as it stands in the form: which model, what body, whose weights. */

import { attentionUrl } from "./api.js";
import { JsonBody, openFile } from "./bodies.js";
import { byId, element } from "./dom.js";
import { allowsSelf, makeExample } from "./example.js";

/**
 * @typedef {object} Request
 * @property {string} url
 * @property {import("./bodies.js").Body} body
 * @property {number[]} heads
 * @property {boolean} isMean
 * @property {string} key
 */

export class Form {
  /**
   * @param {() => void} changed called when another request stands in it, or the same is wanted again
   * @param {() => void} relabelled called when tokens have other labels
   */
  constructor(changed, relabelled) {
    this._changed = changed;
    this._models = /** @type {import("./api.js").Model[]} */ ([]);
    this._file = /** @type {File | null} */ (null);
    this._body = /** @type {import("./bodies.js").Body | null} */ (null);
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      changed();
    });
    byId("model").addEventListener("change", () => this._takeModel());
    byId("example").addEventListener("change", () => this._takeExample());
    byId("heads").addEventListener("change", changed);
    for (const radio of document.getElementsByName("weights")) radio.addEventListener("change", changed);
    for (const id of ["query-labels", "key-labels"]) byId(id).addEventListener("input", relabelled);
    this._listenForFiles();
  }

  /** @param {import("./api.js").Model[]} models */
  setModels(models) {
    this._models = models;
    byId("model").replaceChildren(...models.map(({ name, version }, index) =>
      element("option", { value: index }, `${name}, version ${version}`)));
    byId("run").disabled = models.length === 0;
    if (models.length > 0) this._fitModel();
  }

  /** @returns {Request | null} null while there is no model */
  request() {
    if (this._body === null) return null;
    const heads = Array.from(byId("heads").querySelectorAll("input:checked"), ({ value }) => Number(value));
    const isMean = checked("weights") === "mean";
    const url = attentionUrl(this._model(), { heads, isMean });
    return { url, body: this._body, heads, isMean, key: byId("key").value };
  }

  /** @returns {import("./answer.js").Labels} */
  labels() {
    const words = (id) => byId(id).value.split(/\s+/).filter(Boolean);
    return { queries: words("query-labels"), keys: words("key-labels") };
  }

  /** Lets a key be given, because the server wants one. */
  askForKey() {
    const wasHidden = byId("key-row").hidden;
    byId("key-row").hidden = false;
    if (wasHidden) byId("key").focus();
  }

  _model() {
    return this._models[Number(byId("model").value)];
  }

  _takeModel() {
    this._fitModel();
    this._changed();
  }

  _fitModel() {
    const { layer } = this._model();
    const boxes = Array.from({ length: layer.num_heads }, (_, head) =>
      element("label", {}, element("input", { type: "checkbox", value: head, checked: true }), ` ${head}`));
    byId("heads").replaceChildren(...boxes);
    const self = document.querySelector('input[name="kind"][value="self"]');
    self.disabled = !allowsSelf(layer);
    if (self.disabled) document.querySelector('input[name="kind"][value="cross"]').checked = true;
    byId("no-self").hidden = !self.disabled;
    if (this._file === null) this._setBody(this._example());
  }

  _example() {
    const choice = { seed: Number(byId("seed").value), isSelf: checked("kind") === "self" };
    return JsonBody.of(makeExample(this._model().layer, choice));
  }

  _takeExample() {
    if (this._models.length === 0) return;
    this._setBody(this._example());
    this._changed();
  }

  _setBody(body) {
    this._body = body;
    const { shape, validLens } = body;
    const isPerQuery = Array.isArray(validLens?.[0]);
    byId("lengths-note").textContent = noSliders(shape, isPerQuery);
    const numKeys = shape === null || isPerQuery ? [] : shape.numKeys;
    const lens = numKeys.map((most, entry) => validLens?.[entry] ?? most);
    byId("sliders").replaceChildren(...numKeys.map((most, entry) => this._slider(entry, most, lens)));
  }

  _slider(entry, most, lens) {
    const said = element("output", { for: `length-${entry}` });
    const range = { type: "range", id: `length-${entry}`, min: 0, max: most, step: 1, value: lens[entry] };
    const input = /** @type {HTMLInputElement} */ (element("input", range));
    const say = () => {
      said.textContent = `${lens[entry]} of ${most}`;
      input.setAttribute("aria-valuetext", `${lens[entry]} of ${most} keys`);
    };
    input.addEventListener("input", () => {
      lens[entry] = input.valueAsNumber;
      say();
      this._body = this._body.withValidLens([...lens]);
      this._changed();
    });
    say();
    return element("div", { class: "slider" }, element("label", { for: input.id }, `Entry ${entry}`), input, said);
  }

  _listenForFiles() {
    byId("file").addEventListener("change", ({ target }) => this._takeFile(target.files[0] ?? null));
    byId("file-clear").addEventListener("click", () => this._takeFile(null));
    // Anywhere on the page, or the browser would leave it for the file.
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      byId("drop").classList.add("over");
    });
    document.addEventListener("dragleave", () => byId("drop").classList.remove("over"));
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      byId("drop").classList.remove("over");
      if (event.dataTransfer.files.length > 0) this._takeFile(event.dataTransfer.files[0]);
    });
  }

  async _takeFile(file) {
    const body = file && (await openFile(file));
    if (file && body === null) {
      byId("file-note").textContent = `${file.name}: want a name that ends in .json, .safetensors or .npz`;
      return;
    }
    this._file = file;
    byId("file").value = "";
    byId("example").disabled = file !== null;
    byId("file-clear").hidden = file === null;
    byId("file-note").textContent = file ? `${file.name}, ${file.size} bytes` : "";
    if (this._models.length === 0) return;
    this._setBody(body ?? this._example());
    this._changed();
  }
}

function noSliders(shape, isPerQuery) {
  if (shape === null) return "No sliders: the page does not know this body's shapes, and posts it as it is.";
  return isPerQuery ? "This body has a length for every query, which the page leaves alone." : "";
}

function checked(name) {
  return document.querySelector(`input[name="${name}"]:checked`).value;
}
