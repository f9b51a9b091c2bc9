/** The page: what is asked with the form is answered beside it. */

import { drawEntry, drawRefusal, summary } from "./answer.js";
import { attend, listModels } from "./api.js";
import { curlLine, isInline } from "./curl.js";
import { byId, element } from "./dom.js";
import { Form } from "./form.js";
import { startLive } from "./live.js";
import { drawModels } from "./served.js";

const AGAIN_MS = 2000;

/** @type {import("./answer.js").Shown | null} */
let shown = null;
let isRunning = false;
let isWantedAgain = false;

const form = new Form(run, redraw);
byId("entry").addEventListener("change", redraw);
byId("copy").addEventListener("click", copy);
loadModels();
startLive();

async function loadModels() {
  try {
    const models = await listModels();
    drawModels(models);
    form.setModels(models);
    drawRefusal(null);
  } catch (error) {
    drawRefusal(error);
    setTimeout(loadModels, AGAIN_MS); // a server that starts says so with a refusal
  }
}

// One request at a time: while a slider moves, the places it passes are skipped, and where it stops is asked for.
async function run() {
  isWantedAgain = true;
  if (isRunning) return;
  isRunning = true;
  while (isWantedAgain) {
    isWantedAgain = false;
    const request = form.request();
    if (request !== null) await ask(request);
  }
  isRunning = false;
}

/** @param {import("./form.js").Request} request */
async function ask(request) {
  drawCurl(request);
  try {
    const answer = await attend(request.url, request.body, request.key);
    shown = { answer, body: request.body, heads: request.heads, isMean: request.isMean };
    drawRefusal(null);
    offerEntries(answer.output.length);
    redraw();
    byId("status").textContent = summary(shown);
  } catch (error) {
    shown = null;
    byId("status").textContent = "";
    drawRefusal(error);
    if (error.status === 401) form.askForKey();
  }
  byId("shown").hidden = shown === null;
}

function redraw() {
  if (shown !== null) drawEntry(shown, Number(byId("entry").value), form.labels());
}

function offerEntries(count) {
  const select = byId("entry");
  if (select.options.length === count) return;
  const option = (_, entry) => element("option", { value: entry }, String(entry));
  select.replaceChildren(...Array.from({ length: count }, option));
}

/** @param {import("./form.js").Request} request */
function drawCurl({ url, body, key }) {
  byId("curl").textContent = curlLine(url, body, key !== "");
  byId("copy").disabled = false;
  byId("copied").textContent = "";
  const link = byId("body");
  URL.revokeObjectURL(link.href);
  link.hidden = isInline(body);
  link.href = URL.createObjectURL(new Blob([body.content]));
  link.download = body.fileName;
  link.textContent = `Save ${body.fileName}`;
}

async function copy() {
  try {
    await navigator.clipboard.writeText(byId("curl").textContent);
    byId("copied").textContent = "Copied.";
  } catch {
    // Only pages from this machine or over HTTPS may write to the clipboard.
    getSelection().selectAllChildren(byId("curl"));
    byId("copied").textContent = "Selected; copy it with the keyboard.";
  }
}
