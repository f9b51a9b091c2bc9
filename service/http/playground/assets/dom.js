/** Elements, made without markup in strings: no text of a file or of the server can become a tag. */

/**
 * A new element.
 * @param {string} tag
 * @param {Record<string, string | number | boolean>} [attributes] those that are false are left out
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
  return made;
}

/**
 * The element of the page with that id.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Pairs of a description list.
 * @param {Iterable<[string, string | number | boolean]>} facts
 * @returns {HTMLElement[]} a `div` for each
 */
export function pairs(facts) {
  return Array.from(facts, ([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value))));
}
