/** A request as a line for a shell. */

const LONGEST_INLINE = 2000;

/**
 * Whether the body is short enough to stand in the line itself.
 * @param {import("./bodies.js").Body} body
 */
export function isInline(body) {
  // A leading @ or anything else that is no object would mean something to curl.
  return typeof body.content === "string" && body.content.length <= LONGEST_INLINE && body.content.startsWith("{");
}

/**
 * The line. It never holds a key: that is taken from the shell's variable API_KEY.
 * @param {string} url
 * @param {import("./bodies.js").Body} body
 * @param {boolean} hasKey
 * @returns {string}
 */
export function curlLine(url, body, hasKey) {
  const flag = body.mediaType === "application/json" ? "-d" : "--data-binary";
  const parts = [
    `curl ${quoted(url)}`,
    `-H 'Content-Type: ${body.mediaType}'`,
    "-H 'Accept: application/json'",
    ...(hasKey ? ['-H "X-API-Key: $API_KEY"'] : []),
    `${flag} ${isInline(body) ? quoted(String(body.content)) : `@${body.fileName}`}`,
  ];
  return parts.join(" \\\n  ");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
