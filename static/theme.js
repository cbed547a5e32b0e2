// Runs before the first paint, so that a chosen theme does not flash. No choice: the system's preference rules.
const chosen = localStorage.getItem("theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
