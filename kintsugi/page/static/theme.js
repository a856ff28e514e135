// Applies the chosen theme before the first paint. A classic script: modules run only after the document was parsed.
(() => {
  let choice = null;
  try {
    choice = localStorage.getItem("kintsugi.theme");
  } catch {
    // Storage may be forbidden; the theme then follows the system.
  }
  if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
})();
