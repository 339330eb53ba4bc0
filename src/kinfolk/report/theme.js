"use strict";
function preferredTheme() {
  let kept = null;
  try { kept = localStorage.getItem("kinfolk-theme"); } catch { /* a page from disk may have no storage */ }
  return kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
document.documentElement.dataset.theme = preferredTheme();
