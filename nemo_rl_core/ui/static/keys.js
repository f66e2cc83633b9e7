// "/" goes to the search; a link with data-key is followed when its key is pressed.
"use strict";
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input, select, textarea, [contenteditable]");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("find").focus();
  } else {
    document.querySelector(`[data-key="${CSS.escape(event.key)}"]`)?.click();
  }
});
