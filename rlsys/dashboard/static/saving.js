/** Files made of a chart, to put into a paper or a table. */

import { colour } from "./theme.js";

const HEAD = 52; // pixels above the plot, for title and legend

/** Save text as `<title>.csv`. */
export function saveCsv(title, text) {
  save(title, "csv", new Blob([text], { type: "text/csv" }));
}

/** Save what a uPlot shows as `<title>.png`, with its title, unit and legend. */
export function savePng(plot, { title, lines, unit }) {
  const scale = devicePixelRatio;
  const { canvas: drawn } = plot.ctx;
  const canvas = Object.assign(document.createElement("canvas"), {
    width: drawn.width,
    height: drawn.height + HEAD * scale,
  });
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = colour("--page");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.drawImage(drawn, 0, HEAD * scale);
  ctx.scale(scale, scale);
  const family = getComputedStyle(document.body).fontFamily;
  ctx.fillStyle = colour("--text");
  ctx.font = `600 13px ${family}`;
  ctx.fillText(unit ? `${title} (${unit})` : title, 10, 20);
  ctx.font = `11px ${family}`;
  let left = 10;
  for (const { label, colour: name } of lines) {
    ctx.fillStyle = colour(name);
    ctx.fillRect(left, 34, 14, 3);
    ctx.fillStyle = colour("--text");
    ctx.fillText(label, left + 18, 39);
    left += ctx.measureText(label).width + 34;
  }
  canvas.toBlob((blob) => save(title, "png", blob));
}

function save(title, kind, blob) {
  const href = URL.createObjectURL(blob);
  const name = `${title.replace(/[^\w.-]+/g, "_")}.${kind}`;
  Object.assign(document.createElement("a"), { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
