// Shows times in the zone of the browser; the server renders UTC.
"use strict";
(() => {
  const local = () => {
    for (const one of document.querySelectorAll("time[data-local] > span")) {
      const at = new Date(one.parentElement.dateTime);
      const two = (number) => String(number).padStart(2, "0");
      one.textContent = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} `
        + `${two(at.getHours())}:${two(at.getMinutes())}`;
    }
  };
  local();
  addEventListener("live", local);
})();
