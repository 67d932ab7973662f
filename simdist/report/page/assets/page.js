"use strict";

/* The colours of the page, and which run its timeline shows. */

(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const NEXT = { automatic: "dark", dark: "light", light: "automatic" };

  /* Canvases do not follow style sheets; each script that draws on one listens. */
  const tell = () => document.dispatchEvent(new Event("themechange"));

  function chooseTheme(name) {
    if (name === "automatic") delete root.dataset.theme;
    else root.dataset.theme = name;
    button.textContent = `Colours: ${name}`;
    tell();
  }

  button.addEventListener("click", () => chooseTheme(NEXT[root.dataset.theme ?? "automatic"]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);

  /* Paper is light; canvases have to be told. */
  let onScreen = "automatic";
  addEventListener("beforeprint", () => {
    onScreen = root.dataset.theme ?? "automatic";
    chooseTheme("light");
  });
  addEventListener("afterprint", () => chooseTheme(onScreen));

  const run = document.getElementById("timeline-run");
  run?.addEventListener("change", () => {
    for (const timeline of document.querySelectorAll("[data-timeline]")) {
      timeline.hidden = timeline.dataset.timeline !== run.value;
    }
  });

  for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
})();
