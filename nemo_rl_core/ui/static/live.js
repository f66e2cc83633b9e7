// Keeps the page of a running execution up to date: fetches it again and replaces changed parts.
"use strict";
(() => {
  const every = Number(document.documentElement.dataset.liveSeconds) * 1000;
  if (!every) return;

  function put(part, newer) {
    // Opened details stay open.
    const opened = [...part.querySelectorAll("details")].map((one) => one.open);
    newer.querySelectorAll("details").forEach((one, index) => { if (opened[index]) one.open = true; });
    if (part.innerHTML === newer.innerHTML) return;
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    const again = focused && (focused.id ? `#${CSS.escape(focused.id)}`
      : focused.getAttribute("href") ? `[href="${CSS.escape(focused.getAttribute("href"))}"]` : null);
    // Nodes of a parsed document: scripts in it are never run.
    part.replaceChildren(...newer.childNodes);
    if (again) part.querySelector(again)?.focus({ preventScroll: true });
    part.dispatchEvent(new CustomEvent("live", { bubbles: true }));
  }

  async function renew() {
    let isRunning = true;
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, { headers: { accept: "text/html" } });
        if (answer.ok) {
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          for (const part of document.querySelectorAll("[data-live]")) {
            const newer = page.querySelector(`[data-live="${part.dataset.live}"]`);
            if (newer) put(part, newer);
          }
          isRunning = Number(page.documentElement.dataset.liveSeconds) > 0;
        }
      } catch {
        // The server is unreachable; the next round tries again.
      }
    }
    if (isRunning) setTimeout(renew, every);
    else document.documentElement.dataset.liveEnded = "yes";
  }
  setTimeout(renew, every);
})();
