"use strict";
for (const root of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(root.querySelector("script").textContent);
  const find = name => root.querySelector(name);
  const search = find("input[type=search]"), path = find("input[type=checkbox]");
  const found = find(".found"), seen = find("output"), tip = find(".tip");
  const AXIS = 34, FONT = "system-ui, sans-serif";
  const peaks = data.panels.some(panel => panel.rows.some(row => row.peak));
  let GUTTER = 118, RIGHT = 62;
  const measure = () => {
    const narrow = root.clientWidth < 600;
    GUTTER = narrow ? 78 : 118;
    RIGHT = peaks ? narrow ? 46 : 62 : 14;
  };
  let view = [0, 1], hovered = null, matches = [], current = -1;

  // Times are whole numbers of a panel's length, as distances from the end of the box before.
  const unpack = (packed, size) => {
    const items = [];
    for (let at = 0, last = 0; at < packed.length; at += size) {
      const start = (last + packed[at]) / data.unit, end = start + packed[at + 1] / data.unit;
      last += packed[at] + packed[at + 1];
      items.push([start, end, ...packed.slice(at + 2, at + size)]);
    }
    return items;
  };
  data.widest = "0".repeat(data.labels.reduce((most, [, short, extra]) => Math.max(most, extra ? short.length : 0), 0));
  const panels = data.panels.map((panel, index) => {
    const canvas = root.querySelectorAll("canvas")[index];
    let top = 4;
    const rows = panel.rows.map(row => {
      const high = panel.rows.length > 64 ? 10 : panel.rows.length > 24 ? 16 : 24;
      const height = row.lane ? Math.max(8, high * 0.6) : high, strip = row.memory ? high * 0.4 : 0;
      const head = row.head ? 20 : 0;
      const at = { ...row, top: top + head, headTop: top, height, strip,
        boxes: unpack(row.boxes, row.size).map(([start, end, tone, label, chunk = 0, half = 0]) => ({ start, end, tone, label, chunk, half })),
        parts: row.parts ? unpack(row.parts, 3) : null, gaps: unpack(row.gaps || [], 3) };
      top = at.top + height + strip + (high > 10 ? 5 : 2);
      return at;
    });
    canvas.style.height = top + AXIS + "px";
    return { ...panel, canvas, rows, bottom: top, number: index };
  });

  const color = name => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const luminance = hex => [1, 3, 5].reduce((sum, at, index) => {
    const part = parseInt(hex.slice(at, at + 2), 16) / 255;
    return sum + [0.2126, 0.7152, 0.0722][index] * (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  }, 0);
  const ink = data.tones.map(([, fill]) => luminance(fill) > 0.198 ? "#14171b" : "#ffffff");
  const amount = (value, [name, factor]) => `${+(value * factor).toPrecision(4)} ${name}`.trim();
  const time = (share, panel) => amount(share * panel.length, panel.scale);

  // The smallest index whose item ends after a time.
  const from = (items, time) => {
    let low = 0, high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((items[middle].end ?? items[middle][1]) < time) low = middle + 1; else high = middle;
    }
    return low;
  };
  const hatch = (pen, x, y, width, height, cause) => {
    pen.strokeStyle = color("hatch-" + data.causes[cause]);
    pen.lineWidth = 1;
    pen.save();
    pen.beginPath(); pen.rect(x, y, width, height); pen.clip();
    pen.beginPath();
    data.hatches[cause].forEach((step, falls) => {
      for (let at = Math.floor((x - height) / step) * step; step && at < x + width; at += step) {
        pen.moveTo(at, falls ? y : y + height); pen.lineTo(at + height, falls ? y + height : y);
      }
    });
    pen.stroke();
    pen.restore();
  };

  const shortened = (pen, words, room, size) => {
    pen.font = `${size}px ${FONT}`;
    let kept = words;
    while (kept.length > 1 && pen.measureText(kept + (kept === words ? "" : "…")).width > room) kept = kept.slice(0, -1);
    return kept === words ? words : kept + "…";
  };
  const draw = panel => {
    const { canvas } = panel, ratio = window.devicePixelRatio || 1;
    const wide = canvas.clientWidth, high = canvas.clientHeight, inner = Math.max(1, wide - GUTTER - RIGHT);
    if (!wide) return;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const x = share => GUTTER + (share - view[0]) / (view[1] - view[0]) * inner;
    const text = (words, left, top, fill, size = 12, align = "left", weight = "") => {
      pen.font = `${weight} ${size}px ${FONT}`; pen.fillStyle = fill; pen.textAlign = align; pen.textBaseline = "middle";
      pen.fillText(words, left, top);
    };
    let titled = -99;
    for (const row of panel.rows) {
      if (row.head) text(row.head, 0, row.headTop + 11, color("ink"), 12, "left", "600");
      const middle = row.top + row.height / 2;
      if (middle - titled >= 12) { text(shortened(pen, row.title, GUTTER - 10, row.lane ? 11 : 12), GUTTER - 8, middle, color(row.lane ? "faint" : "ink"), row.lane ? 11 : 12, "right"); titled = middle; }
      if (row.peak) text(row.peak, wide - RIGHT + 6, row.top + row.height + row.strip / 2, color("faint"), 11);
    }
    ticks(panel, pen, x, inner, text);
    pen.save();
    pen.beginPath(); pen.rect(GUTTER, 0, inner, high); pen.clip();
    for (const row of panel.rows) drawRow(panel, row, pen, x, text);
    if (path?.checked) drawPath(panel, pen, x);
    pen.restore();
    text(panel.axis, GUTTER + inner / 2, panel.bottom + AXIS - 8, color("faint"), 11, "center");
  };

  const ticks = (panel, pen, x, inner, text) => {
    const span = (view[1] - view[0]) * panel.length * panel.scale[1], least = span / Math.max(2, inner / 70);
    const unit = 10 ** Math.floor(Math.log10(least)), step = [1, 2, 5, 10].map(factor => factor * unit).find(size => size >= least);
    const first = Math.ceil(view[0] * panel.length * panel.scale[1] / step);
    pen.strokeStyle = color("line"); pen.lineWidth = 1; pen.beginPath();
    for (let index = first; index * step <= view[0] * panel.length * panel.scale[1] + span; index++) {
      const at = Math.round(x(index * step / panel.scale[1] / panel.length)) + 0.5;
      for (const row of panel.rows) { pen.moveTo(at, row.top - 3); pen.lineTo(at, row.top + row.height + row.strip + 3); }
      pen.moveTo(at, panel.bottom); pen.lineTo(at, panel.bottom + 4);
      text(String(+(index * step).toPrecision(7)), at, panel.bottom + 12, color("ink"), 11, "center");
    }
    pen.stroke();
  };

  const drawRow = (panel, row, pen, x, text) => {
    for (let index = from(row.gaps, view[0]); index < row.gaps.length && row.gaps[index][0] < view[1]; index++) {
      const [start, end, cause] = row.gaps[index], name = data.causes[cause], left = x(start), width = x(end) - left;
      pen.fillStyle = color("idle-" + name);
      pen.fillRect(left, row.top, width, row.height);
      if (width > 3) {
        const shown = Math.max(left, GUTTER);
        hatch(pen, shown, row.top, Math.min(left + width, pen.canvas.clientWidth) - shown, row.height, cause);
      }
    }
    const searching = search.value.trim() !== "";
    for (let index = Math.max(0, from(row.boxes, view[0]) - 1); index < row.boxes.length && row.boxes[index].start < view[1]; index++) {
      const box = row.boxes[index];
      if (box.end < view[0]) continue;
      const left = x(box.start), width = Math.max(0.75, x(box.end) - left), [top, height] = place(row, box);
      pen.globalAlpha = searching && !box.matches ? 0.18 : 1;
      pen.fillStyle = data.tones[box.tone][1];
      pen.fillRect(left, top, width > 3 ? width - 1 : width, height);
      if (box.chunk && width > 2) {
        pen.fillStyle = ink[box.tone];
        for (let mark = 0; mark < Math.min(3, box.chunk); mark++) pen.fillRect(left, top + (box.half ? 0 : 2) + 3 * mark, width > 3 ? width - 1 : width, 1.5);
      }
      if (width > 9 && height >= 10) {
        const shown = Math.max(left, GUTTER), room = Math.min(left + width, pen.canvas.clientWidth) - shown;
        const [, short, extra] = data.labels[box.label];
        pen.font = `11px ${FONT}`;
        // Microbatches are shown where the longest number has room, so that equal boxes look equal.
        const texts = extra ? [[short, data.widest]] : [[short, short], [short.split(" ")[0], short.split(" ")[0]]];
        const fits = texts.find(([, widest]) => pen.measureText(widest).width < room - 3);
        if (fits) text(fits[0], shown + room / 2, top + height / 2 + 0.5, ink[box.tone], 11, "center");
      }
      pen.globalAlpha = 1;
    }
    if (row.memory) {
      const bottom = row.top + row.height + row.strip, unit = 0.92 * row.strip / panel.most;
      pen.fillStyle = color("memory");
      for (let at = 0; at < row.memory.length; at += 2) {
        const end = at + 2 < row.memory.length ? row.memory[at + 2] : panel.makespan * data.unit, left = x(row.memory[at] / data.unit);
        pen.fillRect(left, bottom - unit * row.memory[at + 1], x(end / data.unit) - left + 0.3, unit * row.memory[at + 1]);
      }
    }
    if (hovered?.row === row) {
      pen.strokeStyle = color("ink"); pen.lineWidth = 2;
      pen.strokeRect(x(hovered.start), hovered.top, Math.max(2, x(hovered.end) - x(hovered.start)), hovered.height);
    }
  };
  const place = (row, box) => box.half ? [row.top + (box.half === 2 ? row.height / 2 : 0), row.height / 2] : [row.top, row.height];

  const drawPath = (panel, pen, x) => {
    const tops = panel.rows.filter(row => !row.lane).map(row => row.top), places = panel.rows.filter(row => !row.lane).map(row => row.top + row.height);
    pen.strokeStyle = color("ink"); pen.lineWidth = 2; pen.lineCap = "round"; pen.beginPath();
    for (const [start, rank, end, other] of panel.critical) {
      const left = x(start / data.unit), right = x(end / data.unit);
      pen.moveTo(left, places[rank]);
      // Upright at the edges of boxes, and oblique in the space between rows: there are no texts.
      if (other < rank) pen.lineTo(left, tops[rank]);
      if (other > rank) pen.lineTo(right, tops[other]);
      pen.lineTo(right, places[other]);
    }
    pen.stroke();
  };

  let asked = false;
  const redraw = () => {
    root.dataset.view = view.map(share => share.toFixed(6)).join(" ");
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; measure(); panels.forEach(draw); });
  };
  const show = (start, width) => {
    width = Math.min(1, Math.max(1e-5, width));
    start = Math.min(1 - width, Math.max(0, start));
    view = [start, start + width];
    redraw();
  };
  const zoom = (factor, at = 0.5) => {
    const width = view[1] - view[0], next = Math.min(1, Math.max(1e-5, width / factor));
    show(view[0] + (width - next) * at, next);
  };
  const pan = share => show(view[0] + share * (view[1] - view[0]), view[1] - view[0]);

  const words = (panel, row, box) => {
    const [full, , extra] = data.labels[box.label], name = data.tones[box.tone][0];
    return [row.owner || row.title, full, extra || (name === full ? "" : name), `${time(box.start, panel)} to ${time(box.end, panel)}`, `takes ${time(box.end - box.start, panel)}`].filter(Boolean).join(", ");
  };
  const at = (panel, event) => {
    const area = panel.canvas.getBoundingClientRect(), y = event.clientY - area.top, inner = Math.max(1, area.width - GUTTER - RIGHT);
    const share = view[0] + (event.clientX - area.left - GUTTER) / inner * (view[1] - view[0]), near = 2 / inner * (view[1] - view[0]);
    if (share < view[0] || share > view[1]) return null;
    for (const row of panel.rows) {
      if (y < row.top || y > row.top + row.height + row.strip) continue;
      if (y > row.top + row.height) {
        let held = 0;
        for (let index = 0; index < row.memory.length && row.memory[index] / data.unit <= share; index += 2) held = row.memory[index + 1];
        return { row, start: share, end: share, top: row.top + row.height, height: row.strip, text: `${row.title}, holds ${memory(held, panel)} at ${time(share, panel)}` };
      }
      const part = row.parts?.[from(row.parts, share - near)];
      if (part && part[0] <= share + near) return { row, start: part[0], end: part[1], top: row.top, height: row.height, text: data.texts[part[2]] };
      if (row.parts) return null;
      for (let index = from(row.boxes, share - near); index < row.boxes.length && row.boxes[index].start <= share + near; index++) {
        const box = row.boxes[index], [top, height] = place(row, box);
        if (y >= top && y <= top + height) return { row, start: box.start, end: box.end, top, height, text: words(panel, row, box) };
      }
      const gap = row.gaps[from(row.gaps, share)];
      if (gap && gap[0] <= share) return { row, start: gap[0], end: gap[1], top: row.top, height: row.height, text: `${row.title}, idle: ${data.causeNames[gap[2]]}, ${time(gap[0], panel)} to ${time(gap[1], panel)}, takes ${time(gap[1] - gap[0], panel)}` };
    }
    return null;
  };
  const memory = (held, panel) => {
    if (panel.memoryUnit !== "B") return `${+held.toPrecision(4)} ${panel.memoryUnit}`.trim();
    const power = Math.min(4, Math.floor(Math.log2(Math.max(1, held)) / 10));
    return `${+(held / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  };
  const point = (panel, event) => {
    const before = hovered;
    hovered = at(panel, event);
    if (hovered) {
      seen.textContent = tip.textContent = hovered.text;
      tip.hidden = false;
      const area = root.getBoundingClientRect(), left = event.clientX - area.left + 14;
      tip.style.left = Math.max(0, Math.min(left, area.width - tip.offsetWidth - 4)) + "px";
      tip.style.top = event.clientY - area.top + 18 + "px";
    } else tip.hidden = true;
    if (before !== hovered) redraw();
  };

  for (const panel of panels) {
    let grabbed = null;
    const canvas = panel.canvas;
    canvas.addEventListener("pointerdown", event => { grabbed = event.clientX; canvas.setPointerCapture(event.pointerId); canvas.focus(); point(panel, event); });
    canvas.addEventListener("pointerup", () => { grabbed = null; });
    canvas.addEventListener("pointermove", event => {
      if (grabbed === null) { point(panel, event); return; }
      pan((grabbed - event.clientX) / Math.max(1, canvas.clientWidth - GUTTER - RIGHT));
      grabbed = event.clientX;
    });
    canvas.addEventListener("pointerleave", () => { hovered = null; tip.hidden = true; redraw(); });
    const share = event => { const area = canvas.getBoundingClientRect(); return Math.min(1, Math.max(0, (event.clientX - area.left - GUTTER) / Math.max(1, area.width - GUTTER - RIGHT))); };
    canvas.addEventListener("dblclick", event => zoom(2, share(event)));
    canvas.addEventListener("wheel", event => {
      // The plain wheel scrolls the page.
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(2 ** (-event.deltaY / 240), share(event)); }
      else if (event.shiftKey) { event.preventDefault(); pan((event.deltaY || event.deltaX) / 1000); }
    }, { passive: false });
  }
  document.addEventListener("keydown", event => {
    if (event.target.tagName === "INPUT") return;
    const act = { "+": () => zoom(2), "=": () => zoom(2), w: () => zoom(2), "-": () => zoom(0.5), s: () => zoom(0.5), ArrowLeft: () => pan(-0.2), a: () => pan(-0.2), ArrowRight: () => pan(0.2), d: () => pan(0.2), 0: () => show(0, 1), "/": () => search.focus() }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  });
  for (const [name, act] of [[".in", () => zoom(2)], [".out", () => zoom(0.5)], [".fit", () => show(0, 1)]]) find(name).addEventListener("click", act);
  path?.addEventListener("change", redraw);

  const look = () => {
    const wanted = search.value.trim().toLowerCase();
    matches = [];
    for (const panel of panels) for (const row of panel.rows) {
      const hits = row.parts && wanted ? row.parts.filter(part => data.texts[part[2]].toLowerCase().includes(wanted)) : [];
      for (const [start, end, text] of hits) matches.push({ panel, start, end, text: data.texts[text] });
      for (const box of row.boxes) {
        box.matches = wanted && (row.parts ? hits.some(([start, end]) => start < box.end && box.start < end) : words(panel, row, box).toLowerCase().includes(wanted));
        if (box.matches && !row.parts) matches.push({ panel, start: box.start, end: box.end, text: words(panel, row, box) });
      }
    }
    current = -1;
    found.textContent = wanted ? `${matches.length} found` : "";
    redraw();
  };
  search.addEventListener("input", look);
  search.addEventListener("keydown", event => {
    if (event.key === "Escape") { search.value = ""; look(); return; }
    if (event.key !== "Enter" || !matches.length) return;
    event.preventDefault();
    current = (current + (event.shiftKey ? matches.length - 1 : 1)) % matches.length;
    const { start, end, text } = matches[current], width = Math.min(view[1] - view[0], Math.max(0.02, 4 * (end - start)));
    found.textContent = `${current + 1} of ${matches.length}`;
    seen.textContent = text;
    show((start + end) / 2 - width / 2, width);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(root);
  redraw();
}
