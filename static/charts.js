// Draws every [data-figure] with Plotly. A figure is JSON beside it; colours are names of CSS tokens ("--ink"),
// resolved here so that the palette stands in app.css alone and follows the theme.
"use strict";

const CONFIG = {
  displaylogo: false,
  showSendToCloud: false,
  responsive: true,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  toImageButtonOptions: { format: "png", filename: "remat", scale: 2 },
};

const drawn = new WeakSet();
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

function token(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

function resolve(value) {
  if (typeof value === "string") return value.startsWith("--") ? token(value) : value;
  if (Array.isArray(value)) return value.map(resolve);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner)]));
  }
  return value;
}

async function draw(place) {
  const source = document.getElementById(place.dataset.figure);
  const { data, layout } = resolve(JSON.parse(source.textContent));
  if (place.clientWidth < 560) {
    // Under the plot: above it, several rows of names would push the plot out of sight.
    Object.assign(layout.legend, { y: -0.3, yanchor: "top", font: { size: 11 } });
  }
  await Plotly.react(place, data, layout, CONFIG);
  // Plotly's drawing is one picture to a screen reader; the table below it has the numbers.
  const drawing = place.querySelector(".svg-container");
  for (const svg of drawing.querySelectorAll("svg.main-svg")) svg.setAttribute("aria-hidden", "true");
  if (drawn.has(place)) return;
  drawn.add(place);
  place.on("plotly_click", (event) => {
    const address = event.points[0]?.customdata;
    if (typeof address === "string" && address.startsWith("/")) location.assign(address);
  });
}

function drawAll() {
  for (const place of document.querySelectorAll("[data-figure]")) draw(place);
}

document.addEventListener("htmx:after:swap", drawAll);
document.addEventListener("theme", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
