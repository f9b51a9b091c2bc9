/** The figures at the top, read every two seconds as long as somebody can see them. */

import { readMetrics } from "./api.js";
import { byId } from "./dom.js";
import { figures, parseMetrics } from "./metrics.js";

const EVERY_MS = 2000;
const LOOKS_KEPT = 6; // so that the oldest is 10 s old

/** Starts looking; never ends. */
export function startLive() {
  /** @type {{at: number, samples: import("./metrics.js").Sample[]}[]} */
  let looks = [];
  let timer = 0;

  const look = async () => {
    try {
      looks = [...looks, { at: performance.now(), samples: parseMetrics(await readMetrics()) }].slice(-LOOKS_KEPT);
      const [first, last] = [looks[0], looks[looks.length - 1]];
      draw(figures(last.samples, first.samples, (last.at - first.at) / 1000));
      byId("live-fault").textContent = "";
    } catch (error) {
      byId("live-fault").textContent = `Not to be had now: ${error.message}`;
    }
    schedule();
  };
  const schedule = () => {
    clearTimeout(timer);
    if (document.visibilityState === "visible") timer = setTimeout(look, EVERY_MS);
  };
  document.addEventListener("visibilitychange", () => {
    looks = []; // what happened meanwhile is no rate of the last seconds
    schedule();
  });
  look();
}

/** @param {import("./metrics.js").Figures} now */
function draw(now) {
  const texts = {
    answered: now.answered,
    refused: now.refused,
    "in-flight": now.inFlight,
    waiting: now.waiting,
    rate: now.rate.toFixed(1),
    median: now.medianMs === null ? "–" : `${now.medianMs.toPrecision(2)} ms`,
    saved: now.saved === null ? "–" : `${Math.round(now.saved * 100)} %`,
  };
  for (const [name, text] of Object.entries(texts)) byId(`live-${name}`).textContent = String(text);
}
