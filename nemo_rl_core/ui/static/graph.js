// Draws the graph that the page contains as JSON. dagre computes the layout.
"use strict";
(() => {
  const figure = document.querySelector("[data-graph]");
  if (!figure) return;
  const SVG = "http://www.w3.org/2000/svg";
  const LEAF_WIDTH = 214, LEAF_HEIGHT = 54, LABEL_LENGTH = 25, MIN_READABLE = 0.7;
  const picture = figure.querySelector("svg");
  const view = { x: 0, y: 0, scale: 1 };
  const opened = new Map();
  let data, children, byId, size, shown = "", showsValues = false;
  let fitted = true; // until a reader moves the picture

  function make(name, attributes = {}, ...inside) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  }
  const short = (text) => text.length > LABEL_LENGTH ? `${text.slice(0, LABEL_LENGTH - 1)}…` : text;
  const isOpen = (node) => opened.get(node.id) ?? node.open;
  const isCluster = (node) => children.has(node.id) && isOpen(node);

  function read() {
    const text = document.getElementById("graph-data").textContent;
    if (text === shown) return false;
    shown = text;
    data = JSON.parse(text);
    byId = new Map(data.nodes.map((node) => [node.id, node]));
    children = new Map();
    for (const node of data.nodes) {
      if (!byId.has(node.parent)) continue;
      if (!children.has(node.parent)) children.set(node.parent, []);
      children.get(node.parent).push(node);
    }
    return true;
  }

  // The node that is shown for this one: itself, or the outermost closed one around it.
  function standIn(id) {
    let node = byId.get(id), found = node;
    while (node) {
      node = byId.get(node.parent);
      if (node && !isOpen(node)) found = node;
    }
    return found;
  }

  // An edge ends at a leaf: for an open cluster at the first or last ones in it.
  function ends(id, edges, side) {
    if (!isCluster(byId.get(id))) return [id];
    const inside = children.get(id).map((node) => node.id);
    const other = side === "source" ? "target" : "source";
    const members = new Set(inside);
    const free = inside.filter((one) =>
      !edges.some((edge) => edge[side] === one && members.has(edge[other])));
    return free.flatMap((one) => ends(one, edges, side));
  }

  // Visible arrows: lifted out of closed nodes, led into open ones.
  function visibleEdges() {
    const lifted = data.edges
      .filter((edge) => edge.artifact || showsValues)
      .map((edge) => ({ ...edge, source: standIn(edge.source)?.id, target: standIn(edge.target)?.id }))
      .filter((edge) => edge.source !== undefined && edge.target !== undefined && edge.source !== edge.target);
    const inner = (edge) => { // from a cluster to its members: the nesting shows it
      for (let node = byId.get(edge.target); node; node = byId.get(node.parent)) if (node.id === edge.source) return true;
      for (let node = byId.get(edge.source); node; node = byId.get(node.parent)) if (node.id === edge.target) return true;
      return false;
    };
    const found = new Map();
    // An edge into an open box and on to a node in it is drawn once, to the inner node.
    const within = (id, box) => { for (let node = byId.get(byId.get(id).parent); node; node = byId.get(node.parent)) if (node.id === box) return true; return false; };
    const repeated = (edge) => lifted.some((other) =>
      (other.source === edge.source && isCluster(byId.get(edge.target)) && within(other.target, edge.target)) ||
      (other.target === edge.target && isCluster(byId.get(edge.source)) && within(other.source, edge.source)));
    for (const edge of lifted.filter((one) => !inner(one) && !repeated(one))) {
      for (const source of ends(edge.source, lifted, "source")) {
        for (const target of ends(edge.target, lifted, "target")) {
          const key = `${source} ${target}`;
          if (!found.has(key)) found.set(key, { source, target, labels: new Set(), artifact: false });
          found.get(key).artifact ||= edge.artifact;
          if (edge.label) found.get(key).labels.add(edge.label);
        }
      }
    }
    return [...found.values()];
  }

  function layOut() {
    const graph = new dagre.graphlib.Graph({ compound: true });
    graph.setGraph({ rankdir: data.direction, nodesep: 22, ranksep: 46, marginx: 16, marginy: 24 });
    graph.setDefaultEdgeLabel(() => ({}));
    const visible = data.nodes.filter((node) => standIn(node.id) === node);
    for (const node of visible) {
      graph.setNode(String(node.id), isCluster(node) ? { cluster: true } : { width: LEAF_WIDTH, height: LEAF_HEIGHT });
    }
    for (const node of visible) if (byId.has(node.parent)) graph.setParent(String(node.id), String(node.parent));
    const edges = visibleEdges();
    for (const edge of edges) graph.setEdge(String(edge.source), String(edge.target), { weight: edge.artifact ? 2 : 0 });
    dagre.layout(graph);
    return { graph, visible, edges };
  }

  function mark(state, x, y) {
    const template = document.getElementById(`mark-${state}`) ?? document.getElementById("mark-checkpoint");
    const drawn = make("g", { class: `state-${state}`, transform: `translate(${x} ${y})`, "aria-hidden": "true" });
    if (template) for (const part of template.children) drawn.append(part.cloneNode(true));
    return drawn;
  }

  function toggle(node, x, y, text) {
    const label = isOpen(node) ? `Close ${node.label}` : `Open ${node.label}: ${text}`;
    const width = 20 + 7 * text.length;
    const button = make("g", { role: "button", tabindex: 0, "aria-label": label, "aria-expanded": String(isOpen(node)), "data-toggle": node.id },
      make("rect", { class: "pill", x: x - width, y, width, height: 22, rx: 11 }),
      make("text", { x: x - width / 2, y: y + 15, "text-anchor": "middle" }, text));
    const act = (event) => {
      event.preventDefault();
      event.stopPropagation();
      opened.set(node.id, !isOpen(node));
      draw();
    };
    button.addEventListener("click", act);
    button.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") act(event); });
    return button;
  }

  function drawLeaf(node, box) {
    const left = box.x - LEAF_WIDTH / 2, top = box.y - LEAF_HEIGHT / 2;
    const held = children.get(node.id);
    const status = [node.state, node.detail].filter(Boolean).join(" · ");
    const link = make("a", { href: node.href });
    if (node.is_root) link.setAttribute("class", "here");
    if (held) link.append(make("rect", { class: "stack", x: left + 5, y: top + 5, width: LEAF_WIDTH, height: LEAF_HEIGHT, rx: 6 }));
    if (short(node.label) !== node.label) link.append(make("title", {}, node.label));
    link.append(
      make("rect", { class: "box", x: left, y: top, width: LEAF_WIDTH, height: LEAF_HEIGHT, rx: 6 }),
      mark(node.state || node.kind, left + 12, top + 11),
      make("text", { x: left + 36, y: top + 23 }, short(node.label)), " ", // parts the two lines for a screen reader
      make("text", { class: "detail", x: left + 36, y: top + 42 }, short(status)));
    const group = make("g", {}, link);
    if (held) group.append(toggle(node, left + LEAF_WIDTH - 6, top + LEAF_HEIGHT - 14, `+${held.length}`));
    return group;
  }

  function drawCluster(node, box) {
    const header = 14; // dagre leaves no room for a title: the gap to the rank above has it
    const left = box.x - box.width / 2, top = box.y - box.height / 2 - header;
    const title = `${node.label} · ${node.state || node.detail}`;
    return {
      back: make("rect", { class: "cluster", x: left, y: top, width: box.width, height: box.height + header, rx: 10 }),
      head: make("g", {},
        make("a", { href: node.href, "aria-label": title }, make("text", { class: "title", x: left + 14, y: top + 18 }, short(title))),
        toggle(node, left + box.width - 6, top + 4, "–")),
    };
  }

  function drawEdge(edge, points) {
    const [first, ...rest] = points;
    let path = `M${first.x},${first.y}`;
    for (let i = 0; i < rest.length - 1; i++) {
      const middle = { x: (rest[i].x + rest[i + 1].x) / 2, y: (rest[i].y + rest[i + 1].y) / 2 };
      const end = i === rest.length - 2 ? rest[i + 1] : middle;
      path += `Q${rest[i].x},${rest[i].y} ${end.x},${end.y}`;
    }
    if (rest.length === 1) path += `L${rest[0].x},${rest[0].y}`;
    const drawn = make("path", { class: edge.artifact ? "edge" : "edge value", d: path, "marker-end": "url(#arrow)", "data-edge": `${edge.source} ${edge.target}` });
    drawn.append(make("title", {}, `${byId.get(edge.source).label} → ${byId.get(edge.target).label}\n${[...edge.labels].join(", ")}`));
    return drawn;
  }

  function draw() {
    const { graph, visible, edges } = layOut();
    const layer = make("g", { "data-layer": "" });
    const place = (node) => graph.node(String(node.id));
    const depth = (node) => { let n = 0; for (let up = byId.get(node.parent); up; up = byId.get(up.parent)) n += 1; return n; };
    const clusters = visible.filter(isCluster).sort((a, b) => depth(a) - depth(b)).map((node) => drawCluster(node, place(node)));
    for (const { back } of clusters) layer.append(back);
    for (const edge of edges) layer.append(drawEdge(edge, graph.edge(String(edge.source), String(edge.target)).points));
    for (const { head } of clusters) layer.append(head); // over the arrows that cross it
    // In reading order, so that the tab key goes the way the data goes.
    const leaves = visible.filter((node) => !isCluster(node)).sort((a, b) => place(a).y - place(b).y || place(a).x - place(b).x);
    for (const node of leaves) layer.append(drawLeaf(node, place(node)));
    const focused = picture.contains(document.activeElement) ? document.activeElement : null;
    const again = ["href", "data-toggle"].find((name) => focused?.hasAttribute(name));
    picture.querySelector("[data-layer]")?.remove();
    picture.append(layer);
    size = graph.graph();
    picture.dataset.drawn = String(visible.length);
    move();
    if (again) picture.querySelector(`[${again}="${CSS.escape(focused.getAttribute(again))}"]`)?.focus({ preventScroll: true });
  }

  function move() {
    picture.querySelector("[data-layer]")?.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
  }

  function fit() {
    const { width, height } = picture.getBoundingClientRect();
    view.scale = Math.max(MIN_READABLE, Math.min(1, width / size.width, height / size.height));
    view.x = Math.max(0, (width - size.width * view.scale) / 2);
    view.y = Math.max(0, (height - size.height * view.scale) / 2);
    fitted = true;
    move();
  }

  function zoom(factor, at) {
    const { width, height } = picture.getBoundingClientRect();
    const centre = at ?? { x: width / 2, y: height / 2 };
    const scale = Math.min(3, Math.max(0.1, view.scale * factor));
    view.x = centre.x - (centre.x - view.x) * scale / view.scale;
    view.y = centre.y - (centre.y - view.y) * scale / view.scale;
    view.scale = scale;
    fitted = false;
    move();
  }

  function pan(x, y) {
    if (!x && !y) return;
    view.x += x;
    view.y += y;
    fitted = false;
    move();
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = 60;
    const acts = {
      "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), "0": fit,
      ArrowLeft: () => pan(step, 0), ArrowRight: () => pan(-step, 0), ArrowUp: () => pan(0, step), ArrowDown: () => pan(0, -step),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // Scrolls a focused element into view.
  function onFocus(event) {
    if (event.target === picture || !event.target.matches(":focus-visible")) return;
    const box = event.target.getBoundingClientRect(), frame = picture.getBoundingClientRect();
    const margin = 24;
    const outside = (low, high, from, to) => low < from + margin ? from + margin - low : high > to - margin ? to - margin - high : 0;
    pan(outside(box.left, box.right, frame.left, frame.right), outside(box.top, box.bottom, frame.top, frame.bottom));
  }

  function onPointer(event) {
    if (event.button !== 0 || event.target.closest("a, [role=button]")) return;
    let last = event;
    const follow = (now) => { pan(now.clientX - last.clientX, now.clientY - last.clientY); last = now; };
    const end = () => { picture.removeEventListener("pointermove", follow); picture.removeEventListener("pointerup", end); };
    picture.setPointerCapture(event.pointerId);
    picture.addEventListener("pointermove", follow);
    picture.addEventListener("pointerup", end);
  }

  read();
  draw();
  fit();
  picture.addEventListener("keydown", onKey);
  picture.addEventListener("focusin", onFocus);
  picture.addEventListener("pointerdown", onPointer);
  picture.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page, as everywhere
    event.preventDefault();
    const frame = picture.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 300), { x: event.clientX - frame.left, y: event.clientY - frame.top });
  }, { passive: false });
  figure.querySelector("[data-do=in]").addEventListener("click", () => zoom(1.25));
  figure.querySelector("[data-do=out]").addEventListener("click", () => zoom(0.8));
  figure.querySelector("[data-do=fit]").addEventListener("click", fit);
  figure.querySelector("[data-do=values]")?.addEventListener("click", (event) => {
    showsValues = !showsValues;
    event.currentTarget.setAttribute("aria-pressed", String(showsValues));
    draw();
  });
  const refit = () => { if (fitted) fit(); };
  document.addEventListener("live", () => { if (read()) { draw(); refit(); } });
  new ResizeObserver(refit).observe(picture);
})();
