// What every page needs: the theme switch, copy buttons, and forms that submit once.
"use strict";

const root = document.documentElement;

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const toggle = document.querySelector("[data-theme-toggle]");
toggle.hidden = false;
toggle.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
});

function reveal(scope) {
  for (const button of scope.querySelectorAll("[data-copy], [data-copy-link]")) button.hidden = !navigator.clipboard;
}

async function copy(button) {
  const pre = button.parentElement.querySelector("pre");
  await navigator.clipboard.writeText(button.hasAttribute("data-copy-link") ? location.href : pre.textContent);
  const before = button.innerHTML;
  button.textContent = "Copied";
  setTimeout(() => { button.innerHTML = before; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy], [data-copy-link]");
  if (button) copy(button);
});

// A double click must not send a form twice; coming back to the page must not find its button dead.
document.addEventListener("submit", (event) => {
  for (const button of event.target.querySelectorAll("button[data-once]")) {
    button.setAttribute("aria-disabled", "true");
    setTimeout(() => { button.disabled = true; });
  }
});
addEventListener("pageshow", () => {
  for (const button of document.querySelectorAll("button[data-once]")) {
    button.disabled = false;
    button.removeAttribute("aria-disabled");
  }
});

// The log stays at its end unless the reader has scrolled up.
function follow(scope) {
  for (const log of scope.querySelectorAll("[data-follow]")) log.scrollTop = log.scrollHeight;
}

// One short sentence is announced after a change, not the whole table that changed.
function say() {
  const sentence = document.querySelector("[data-say]")?.dataset.say ?? "";
  const said = document.getElementById("said");
  if (sentence !== said.textContent) said.textContent = sentence;
}

document.addEventListener("htmx:after:swap", () => { reveal(document); follow(document); say(); });
reveal(document);
follow(document);
