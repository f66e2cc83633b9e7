// Saves a chart of uPlot as PNG or as SVG; the browser makes the file, nothing is sent.
"use strict";
window.chartExport = (() => {
  const INK = "#1b1f1c";
  const QUIET = "#565e58";

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name.replace(/[^\w.-]+/g, "_");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function png(u, title) {
    const source = u.ctx.canvas;
    const head = 28 * devicePixelRatio;
    const canvas = document.createElement("canvas");
    canvas.width = source.width;
    canvas.height = source.height + head;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    context.fillStyle = style.getPropertyValue("--raised");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = style.getPropertyValue("--ink");
    context.font = `600 ${14 * devicePixelRatio}px system-ui, sans-serif`;
    context.fillText(title, 10 * devicePixelRatio, 20 * devicePixelRatio);
    context.drawImage(source, 0, head);
    canvas.toBlob((blob) => save(blob, `${title}.png`));
  }

  function svg(u, title) {
    const ratio = devicePixelRatio;
    const [left, top, width, height] = [u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height].map((each) => each / ratio);
    const head = 28;
    const escaped = (text) => String(text).replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);
    const at = (value, scale) => u.valToPos(value, scale) + (scale === "x" ? left : top + head);
    const parts = [`<text x="10" y="20" font-size="14" font-weight="600" fill="${INK}">${escaped(title)}</text>`];
    u.axes.forEach((axis, index) => {
      (axis._splits ?? []).forEach((split, number) => {
        const where = at(split, axis.scale);
        const [min, max] = [u.scales[axis.scale].min, u.scales[axis.scale].max];
        if (split < min || split > max) return;
        parts.push(index === 0
          ? `<path d="M${where},${top + head}v${height}" stroke="#d9dcd8"/><text x="${where}" y="${top + head + height + 18}" text-anchor="middle" font-size="12" fill="${QUIET}">${escaped(axis._values[number] ?? "")}</text>`
          : `<path d="M${left},${where}h${width}" stroke="#d9dcd8"/><text x="${left - 8}" y="${where + 4}" text-anchor="end" font-size="12" fill="${QUIET}">${escaped(axis._values[number] ?? "")}</text>`);
      });
    });
    parts.push(`<clipPath id="plot"><rect x="${left}" y="${top + head}" width="${width}" height="${height}"/></clipPath>`);
    u.series.forEach((series, index) => {
      if (index === 0) return;
      const strokes = [[]];
      u.data[index].forEach((value, number) => {
        if (value === null) strokes.push([]);
        else if (value !== undefined) strokes.at(-1).push(`${at(u.data[0][number], "x").toFixed(1)},${at(value, "y").toFixed(1)}`);
      });
      const color = series.stroke(u, index);
      const isDots = series.paths && series.paths(u, index, 0, 0) === null;
      for (const stroke of strokes.filter((each) => each.length)) {
        parts.push(isDots
          ? stroke.map((point) => `<circle cx="${point.split(",")[0]}" cy="${point.split(",")[1]}" r="4" fill="#ffffff" stroke="${color}" stroke-width="2"/>`).join("")
          : `<polyline clip-path="url(#plot)" points="${stroke.join(" ")}" fill="none" stroke="${color}" stroke-width="${series.width}" stroke-dasharray="${(series.dash ?? []).join(" ")}"/>`);
      }
    });
    const text = `<svg xmlns="http://www.w3.org/2000/svg" width="${u.width}" height="${u.height + head}" font-family="sans-serif"><rect width="100%" height="100%" fill="#ffffff"/>${parts.join("")}</svg>`;
    save(new Blob([text], { type: "image/svg+xml" }), `${title}.svg`);
  }

  return { png, svg };
})();
