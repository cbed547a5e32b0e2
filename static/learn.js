// Sliders beside number fields, and the players that step through moments. The pages work without this file.
"use strict";

function addSliders() {
  for (const field of document.querySelectorAll("input[data-slider]")) {
    const slider = document.createElement("input");
    slider.type = "range";
    slider.min = field.dataset.min;
    slider.max = field.dataset.max;
    slider.step = field.dataset.step;
    slider.value = field.value;
    slider.setAttribute("aria-label", `${field.dataset.label} slider`);
    slider.addEventListener("input", () => { field.value = slider.value; });
    field.addEventListener("input", () => { slider.value = field.value; });
    field.after(slider);
  }
}

// A player shows one of many moments. Its pictures differ; play, step, keys and the scrubber are the same.
const PACE_MS = 700;

function startPlayer(place) {
  const frames = JSON.parse(document.getElementById(place.dataset.frames).textContent);
  const show = PICTURES[place.dataset.player];
  const button = (name) => place.querySelector(`[data-do="${name}"]`);
  const scrubber = place.querySelector("input[type=range]");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let at = Number(place.dataset.at), timer = null;

  function go(index) {
    at = Math.max(0, Math.min(frames.length - 1, index));
    scrubber.value = at;
    scrubber.setAttribute("aria-valuetext", frames[at].text);
    place.querySelector(".moment").textContent = `${at + 1} of ${frames.length}: ${frames[at].text}`;
    show(place, frames[at], at, frames);
    button("back").disabled = at === 0;
    button("next").disabled = at === frames.length - 1;
    if (at === frames.length - 1) pause();
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    button("play").textContent = "Play";
  }
  function play() {
    if (at === frames.length - 1) go(0);
    timer = setInterval(() => (place.isConnected ? go(at + 1) : pause()), PACE_MS);
    button("play").textContent = "Pause";
  }
  const actions = { play: () => (timer ? pause() : play()), back: () => { pause(); go(at - 1); }, next: () => { pause(); go(at + 1); } };
  for (const [name, action] of Object.entries(actions)) button(name).addEventListener("click", action);
  scrubber.addEventListener("input", () => { pause(); go(Number(scrubber.value)); });
  scrubber.max = frames.length - 1;
  place.addEventListener("keydown", (event) => {
    if (event.target === scrubber) return;
    const action = { ArrowLeft: actions.back, ArrowRight: actions.next }[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  for (const link of place.querySelectorAll("[data-without-script]")) link.remove();
  place.querySelector(".controls").hidden = false;
  // Nothing moves by itself; with reduced motion the reader steps instead of playing.
  const settle = () => { button("play").hidden = calm.matches; if (calm.matches) pause(); };
  calm.addEventListener("change", settle);
  settle();
  go(at);
}

function mark(element, name, on) {
  element.toggleAttribute(`data-${name}`, on);
}

const PICTURES = {
  replay(place, frame) {
    for (const block of place.querySelectorAll(".block")) {
      const index = Number(block.dataset.block);
      mark(block, "input", frame.inputs.includes(index));
      mark(block, "inside", frame.inside.includes(index));
      mark(block, "working", frame.block === index);
    }
    for (const cursor of place.querySelectorAll(".cursor")) {
      const x = Number(cursor.dataset.left) + frame.place * Number(cursor.dataset.width);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    }
  },
  tiles(place, frame) {
    for (const picture of place.querySelectorAll("[data-tile]")) picture.hidden = Number(picture.dataset.tile) !== frame.index;
  },
};

function startPlayers() {
  for (const place of document.querySelectorAll("[data-player]:not([data-started])")) {
    place.dataset.started = "true";
    startPlayer(place);
  }
}

addSliders();
startPlayers();
document.addEventListener("htmx:after:swap", startPlayers);
