/** What the server serves, a card for each version of a model. */

import { byId, element, pairs } from "./dom.js";

/** @param {import("./api.js").Model[]} models */
export function drawModels(models) {
  byId("models").replaceChildren(...models.map(card));
}

/** @param {import("./api.js").Model} model */
function card({ name, version, layer, precision, device, parity, limits }) {
  /** @type {[string, string | number | boolean][]} */
  const facts = [
    ["hiddens", layer.num_hiddens],
    ["heads", `${layer.num_heads} of ${layer.head_size}`],
    ["query, key, value size", `${layer.query_size}, ${layer.key_size}, ${layer.value_size}`],
    ["scoring", layer.scoring.replace("_", " ")],
    ["bias", layer.bias ? "yes" : "no"],
    ["precision", precision],
    ["largest error at export", parity.max_error.toExponential(1)],
    ["device", device],
  ];
  const more = element("details", {}, element("summary", {}, "Limits"), list(Object.entries(limits)));
  return element("article", {}, element("h3", {}, `${name}, version ${version}`), list(facts), more);
}

function list(facts) {
  return element("dl", { class: "facts" }, ...pairs(facts).flatMap((pair) => [...pair.children]));
}
