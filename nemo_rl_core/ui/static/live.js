// Keeps a page up to date: the server tells when the record has changed, and changed parts are
// replaced. Only a visible page has a stream, since a browser opens few connections to one server.
"use strict";
(() => {
  const page = document.documentElement;
  const every = Number(page.dataset.liveSeconds) * 1000;
  if (!every) return;
  let source = null;
  let isRenewing = false;
  let isStale = false;
  const shown = new Map(); // each part as the server sent it, before times.js rewrites its times
  for (const part of document.querySelectorAll("[data-live]")) shown.set(part, part.innerHTML);

  function put(part, newer) {
    if (shown.get(part) === newer.innerHTML) return;
    shown.set(part, newer.innerHTML);
    // Opened details stay open, and ticked boxes ticked.
    const opened = [...part.querySelectorAll("details")].map((one) => one.open);
    newer.querySelectorAll("details").forEach((one, index) => { if (opened[index]) one.open = true; });
    const sameBox = (one) => `input[name="${CSS.escape(one.name)}"][value="${CSS.escape(one.value)}"]`;
    newer.querySelectorAll("input").forEach((one) => { one.checked = part.querySelector(sameBox(one))?.checked ?? one.checked; });
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    const again = focused && (focused.matches("input") ? sameBox(focused)
      : focused.id ? `#${CSS.escape(focused.id)}`
      : focused.getAttribute("href") ? `[href="${CSS.escape(focused.getAttribute("href"))}"]` : null);
    // Nodes of a parsed document: scripts in it are never run.
    part.replaceChildren(...newer.childNodes);
    if (again) part.querySelector(again)?.focus({ preventScroll: true });
    part.dispatchEvent(new CustomEvent("live", { bubbles: true }));
  }

  async function renew() {
    if (page.dataset.liveEnded) return;
    if (isRenewing || document.hidden) {
      isStale = true;
      return;
    }
    isRenewing = true;
    isStale = false;
    try {
      const answer = await fetch(page.dataset.liveFrom ?? location.href, { headers: { accept: "text/html" } });
      if (answer.ok) {
        const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of document.querySelectorAll("[data-live]")) {
          const newer = parsed.querySelector(`[data-live="${part.dataset.live}"]`);
          if (newer) put(part, newer);
        }
        document.dispatchEvent(new CustomEvent("renewed"));
        if (!Number(parsed.documentElement.dataset.liveSeconds)) end();
      }
    } catch {
      // The server is unreachable; the stream connects again.
    }
    // Many changes in a second are one renewal.
    setTimeout(() => {
      isRenewing = false;
      if (isStale) renew();
    }, every / 2);
  }

  function end() {
    page.dataset.liveEnded = "yes";
    source?.close();
  }

  function connect() {
    source = new EventSource("/events");
    source.addEventListener("changed", renew);
    source.addEventListener("error", () => {
      // Refused, such as at the limit of streams; a lost connection is opened again by the browser.
      if (source.readyState === EventSource.CLOSED && !page.dataset.liveEnded) setTimeout(poll, 5 * every);
    });
  }

  function poll() {
    if (document.hidden || page.dataset.liveEnded) return;
    renew();
    connect();
  }

  document.addEventListener("visibilitychange", () => {
    if (page.dataset.liveEnded) return;
    if (document.hidden) source?.close();
    else poll();
  });
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) poll(); });
  connect();
  setTimeout(renew, every); // what changed between the page and its stream
})();
