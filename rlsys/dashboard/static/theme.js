/** Light or dark: as the system has it, until the person chooses. */

import { html } from "./html.js";

const KEY = "rlsys-theme";
const NEXT = { auto: "dark", dark: "light", light: "auto" };
const changed = new EventTarget();

let theme = stored();
apply();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);

/** A button that goes through auto, dark and light; `redraw` is called after each. */
export function themeButton(redraw) {
  return html`<button type="button" class="quiet" onclick=${() => choose(redraw)} data-testid="theme" title="Colours: as the system has it, dark, or light"
    aria-label=${`Colours: ${theme}`}>◐<span class="wide">${theme}</span></button>`;
}

/** Call `redraw` when colours changed, until `signal` is aborted: a canvas does not follow by itself. */
export function onTheme(redraw, signal) {
  changed.addEventListener("change", redraw, { signal });
}

/** What a colour of `theme.css` is now, for a canvas: `colour("--accent")`. */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function choose(redraw) {
  theme = NEXT[theme];
  localStorage.setItem(KEY, theme);
  apply();
  tell();
  redraw();
}

function apply() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

function tell() {
  changed.dispatchEvent(new Event("change"));
}

function stored() {
  const value = localStorage.getItem(KEY);
  return value in NEXT ? value : "auto";
}
