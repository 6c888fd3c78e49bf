// Draws the tasks of every stage on a canvas, and lets the reader move in it.
//
// Everything comes from JSON in the page: rows of items (start, duration, kind) in microseconds.
// Where many items fall on a pixel, its colour is the mean over them, from sums made once; so a
// frame costs the same however many items there are.
"use strict";

(() => {
  const FIRST_IDLE = 8; // kinds from here on are causes of idle time
  const AXIS = 38;
  const LEAST_SPAN = 5; // microseconds

  function decode(text, Type) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Type(bytes.buffer);
  }

  function element(name, attributes, text) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function time(us) {
    const size = Math.abs(us);
    if (size >= 1e7) return (us / 1e6).toFixed(2) + " s";
    if (size >= 1e4) return (us / 1e3).toFixed(1) + " ms";
    if (size >= 1e3) return (us / 1e3).toFixed(2) + " ms";
    return us.toFixed(0) + " µs";
  }

  // The last index in [low, high) whose start is not after t; low - 1 if there is none.
  function lastBefore(starts, t, low, high) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= t) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  class Row {
    constructor(given) {
      this.label = given.label;
      this.starts = decode(given.starts, Uint32Array);
      this.lengths = decode(given.lengths, Uint32Array);
      this.kinds = decode(given.kinds, Uint8Array);
      this.microbatches = decode(given.microbatches, Uint32Array);
      this.chunks = decode(given.chunks, Uint8Array);
      this.iterations = decode(given.iterations, Uint32Array);
      this.liveAt = decode(given.live_at, Uint32Array);
      this.live = decode(given.live, Uint16Array);
      this.limit = given.limit;
      this.count = this.starts.length;
      this.mostLive = Math.max(this.limit || 0, this.live.reduce((a, b) => Math.max(a, b), 1));
    }

    // Sums over all items before each one, of time times colour, less the background.
    sumColours(colours, background) {
      this.sums = [0, 1, 2].map(() => new Float64Array(this.count + 1));
      for (let i = 0; i < this.count; i++) {
        const colour = colours[this.kinds[i]] || background;
        // Idle times are drawn at less than full height elsewhere, so they are paler here.
        const weight = this.lengths[i] * (this.kinds[i] >= FIRST_IDLE ? 0.45 : 1);
        for (let c = 0; c < 3; c++) {
          this.sums[c][i + 1] = this.sums[c][i] + weight * (colour[c] - background[c]);
        }
      }
    }

    itemAt(t) {
      const index = lastBefore(this.starts, t, 0, this.count);
      return index >= 0 && t < this.starts[index] + this.lengths[index] ? index : -1;
    }
  }

  class Timeline {
    constructor(root, data) {
      this.data = data;
      this.rows = data.rows.map((row) => new Row(row));
      this.end = data.end;
      this.view = { begin: 0, end: data.end };
      this.row = 0;
      this.item = -1;
      this.twins = [];
      this.build(root);
      this.readColours();
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
        this.readColours();
        this.redraw();
      });
      new ResizeObserver(() => this.resize()).observe(this.canvas);
      this.resize();
    }

    build(root) {
      const help = element("p", { class: "help", id: root.id + "-help" }, this.data.help);
      const bar = element("div", { class: "bar", role: "toolbar", "aria-label": "View of " + this.data.label });
      const button = (text, label, action) => {
        const made = element("button", { type: "button", "aria-label": label, title: label }, text);
        made.addEventListener("click", action);
        bar.append(made);
      };
      button("+", "Zoom in", () => this.zoom(0.5));
      button("−", "Zoom out", () => this.zoom(2));
      button("←", "Earlier", () => this.pan(-0.5));
      button("→", "Later", () => this.pan(0.5));
      button("All", "Show the whole trace", () => this.show(0, this.end));
      if (this.data.batches.length > 1) {
        const choice = element("select", { "aria-label": "Show an iteration" });
        choice.append(element("option", { value: "" }, "Iteration …"));
        this.data.batches.forEach(([iteration], index) =>
          choice.append(element("option", { value: String(index) }, String(iteration))));
        choice.addEventListener("change", () => {
          const batch = this.data.batches[Number(choice.value)];
          if (choice.value !== "") this.show(batch[1], batch[2]);
          choice.value = "";
        });
        bar.append(choice);
      }
      this.range = element("span", { class: "range" });
      bar.append(this.range);
      const height = AXIS + this.rows.length * this.rowHeight();
      this.canvas = element("canvas", {
        tabindex: "0",
        role: "application",
        "aria-roledescription": "timeline",
        "aria-label": this.data.label,
        "aria-describedby": help.id,
      });
      this.canvas.style.height = height + "px";
      this.tip = element("div", { class: "tip", hidden: "" });
      this.spoken = element("p", { class: "spoken", role: "status", "aria-live": "polite" });
      const stage = element("div", { class: "stage" });
      stage.append(this.canvas, this.tip);
      const frame = element("div", { class: "interactive" });
      frame.append(bar, stage, this.spoken, help);
      root.prepend(frame);
      root.classList.add("moves");
      this.context = this.canvas.getContext("2d", { alpha: false });
      this.strip = document.createElement("canvas");
      this.listen();
    }

    rowHeight() {
      return this.rows.length > 32 ? 13 : this.rows.length > 16 ? 22 : 34;
    }

    readColours() {
      const style = getComputedStyle(document.documentElement);
      const value = (name) => style.getPropertyValue(name).trim();
      const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const rgb = (name) => {
        probe.fillStyle = value(name);
        probe.fillRect(0, 0, 1, 1);
        return probe.getImageData(0, 0, 1, 1).data.slice(0, 3);
      };
      this.ink = value("--ink");
      this.faint = value("--line");
      this.paper = value("--paper");
      this.liveInk = value("--live");
      this.names = [];
      this.fills = [];
      const colours = [];
      const background = rgb("--lane");
      this.lane = value("--lane");
      for (const [kind, [name, variable]] of Object.entries(this.data.kinds)) {
        this.names[kind] = name;
        this.fills[kind] = value(variable);
        colours[kind] = rgb(variable);
      }
      this.background = background;
      for (const row of this.rows) row.sumColours(colours, background);
    }

    resize() {
      const ratio = window.devicePixelRatio || 1;
      const box = this.canvas.getBoundingClientRect();
      if (!box.width) return;
      this.ratio = ratio;
      this.width = box.width;
      this.height = box.height;
      this.gutter = box.width < 600 ? 34 : this.rows.some((row) => row.label.length > 9) ? 120 : 64;
      this.canvas.width = Math.round(box.width * ratio);
      this.canvas.height = Math.round(box.height * ratio);
      this.redraw();
    }

    redraw() {
      if (this.frame) return;
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.draw();
      });
    }

    // Moving.

    show(begin, end, fromTwin) {
      let span = Math.min(Math.max(end - begin, LEAST_SPAN), this.end);
      begin = Math.min(Math.max(begin, 0), this.end - span);
      this.view = { begin, end: begin + span };
      this.redraw();
      if (!fromTwin && (!this.link || this.link.checked)) {
        for (const twin of this.twins) twin.show(begin, begin + span, true);
      }
      clearTimeout(this.later);
      if (!fromTwin) this.later = setTimeout(() => this.say(this.where()), 400);
    }

    where() {
      const { begin, end } = this.view;
      const inside = this.data.batches.filter(([, from, to]) => from < end && to > begin);
      const first = inside.length ? inside[0][0] : null;
      const last = inside.length ? inside[inside.length - 1][0] : null;
      const which = first === null ? "" : first === last ? `, iteration ${first}` : `, iterations ${first} to ${last}`;
      return `${begin < 0.5 ? "0" : time(begin)} to ${time(end)}${which}`;
    }

    pan(part) {
      const span = this.view.end - this.view.begin;
      this.show(this.view.begin + part * span, this.view.end + part * span);
    }

    zoom(factor, around) {
      const { begin, end } = this.view;
      const centre = around === undefined ? (begin + end) / 2 : around;
      const span = Math.max((end - begin) * factor, LEAST_SPAN);
      const part = (centre - begin) / (end - begin);
      this.show(centre - part * span, centre + (1 - part) * span);
    }

    say(text) {
      this.spoken.textContent = text;
    }

    // Which task.

    describe(row, index) {
      const kind = row.kinds[index];
      const name = this.names[kind] || "unknown";
      const length = time(row.lengths[index]);
      const from = time(row.starts[index]);
      if (kind >= FIRST_IDLE) return `${row.label}: idle, ${name}; ${length} from ${from}`;
      if (kind > 2) return `${row.label}: ${name}; ${length} from ${from}`;
      const chunk = row.chunks[index] ? `, chunk ${row.chunks[index]}` : "";
      return `${row.label}: ${name} of microbatch ${row.microbatches[index]}${chunk}, ` +
        `iteration ${row.iterations[index]}; ${length} from ${from}`;
    }

    select(rowNumber, index) {
      this.row = Math.min(Math.max(rowNumber, 0), this.rows.length - 1);
      const row = this.rows[this.row];
      this.item = Math.min(Math.max(index, 0), row.count - 1);
      if (this.item < 0) return this.say(`${row.label}: nothing traced`);
      const start = row.starts[this.item];
      const { begin, end } = this.view;
      if (start < begin || start > end) {
        this.show(start - (end - begin) / 2, start + (end - begin) / 2);
        clearTimeout(this.later);
      }
      this.say(this.describe(row, this.item));
      this.redraw();
    }

    listen() {
      const canvas = this.canvas;
      const keys = {
        ArrowLeft: () => this.pan(-0.2),
        ArrowRight: () => this.pan(0.2),
        PageUp: () => this.pan(-0.9),
        PageDown: () => this.pan(0.9),
        Home: () => this.show(0, this.view.end - this.view.begin),
        End: () => this.show(this.end - this.view.end + this.view.begin, this.end),
        "+": () => this.zoom(0.5),
        "=": () => this.zoom(0.5),
        "-": () => this.zoom(2),
        0: () => this.show(0, this.end),
        ArrowUp: () => this.step(-1),
        ArrowDown: () => this.step(1),
        n: () => this.select(this.row, this.nextItem(1)),
        p: () => this.select(this.row, this.nextItem(-1)),
        Enter: () => this.zoomToItem(),
        Escape: () => { this.item = -1; this.tip.hidden = true; this.redraw(); },
      };
      canvas.addEventListener("keydown", (event) => {
        const action = keys[event.key];
        if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        action();
      });
      canvas.addEventListener("wheel", (event) => {
        const unit = event.deltaMode === 1 ? 16 : 1;
        if (event.ctrlKey || event.metaKey) {
          event.preventDefault();
          this.zoom(Math.exp(event.deltaY * unit * 0.004), this.timeAt(event.offsetX));
        } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          event.preventDefault();
          this.pan(((event.deltaX || event.deltaY) * unit) / (this.width - this.gutter));
        }
      }, { passive: false });
      canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event.offsetX)));
      this.pointers = new Map();
      canvas.addEventListener("pointerdown", (event) => {
        canvas.setPointerCapture(event.pointerId);
        this.pointers.set(event.pointerId, event.offsetX);
        this.moved = 0;
      });
      canvas.addEventListener("pointermove", (event) => this.moveTo(event));
      for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
        canvas.addEventListener(name, (event) => {
          if (name === "pointerup" && this.pointers.size === 1 && this.moved < 5) this.click(event);
          this.pointers.delete(event.pointerId);
        });
      }
      canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
      canvas.addEventListener("focus", () => this.redraw());
      canvas.addEventListener("blur", () => this.redraw());
    }

    moveTo(event) {
      const before = this.pointers.get(event.pointerId);
      if (before === undefined) return this.hover(event);
      const width = this.width - this.gutter;
      const span = this.view.end - this.view.begin;
      this.moved += Math.abs(event.offsetX - before);
      this.pointers.set(event.pointerId, event.offsetX);
      if (this.pointers.size === 1) {
        const shift = ((before - event.offsetX) / width) * span;
        this.show(this.view.begin + shift, this.view.end + shift);
      } else {
        const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
        const distance = Math.max(Math.abs(event.offsetX - other), 10);
        const factor = Math.max(Math.abs(before - other), 10) / distance;
        this.zoom(factor, this.timeAt((event.offsetX + other) / 2));
      }
      this.tip.hidden = true;
    }

    timeAt(x) {
      const { begin, end } = this.view;
      return begin + ((x - this.gutter) / (this.width - this.gutter)) * (end - begin);
    }

    rowAt(y) {
      return Math.floor((y - AXIS) / this.rowHeight());
    }

    hover(event) {
      const row = this.rows[this.rowAt(event.offsetY)];
      const index = row && event.offsetX > this.gutter ? row.itemAt(this.timeAt(event.offsetX)) : -1;
      this.tip.hidden = index < 0;
      if (index < 0) return;
      this.tip.textContent = this.describe(row, index);
      const left = Math.min(event.offsetX + 12, this.width - this.tip.offsetWidth - 4);
      this.tip.style.left = Math.max(left, 0) + "px";
      this.tip.style.top = event.offsetY + 16 + "px";
    }

    click(event) {
      const number = this.rowAt(event.offsetY);
      if (!this.rows[number]) return;
      const index = this.rows[number].itemAt(this.timeAt(event.offsetX));
      if (index >= 0) this.select(number, index);
    }

    step(by) {
      const target = Math.min(Math.max(this.row + by, 0), this.rows.length - 1);
      const row = this.rows[target];
      const now = this.rows[this.row];
      const { begin, end } = this.view;
      const at = this.item >= 0 ? now.starts[this.item] : (begin + end) / 2;
      this.select(target, lastBefore(row.starts, at, 0, row.count));
    }

    nextItem(by) {
      const row = this.rows[this.row];
      if (this.item >= 0) return this.item + by;
      return lastBefore(row.starts, this.view.begin, 0, row.count) + 1;
    }

    zoomToItem() {
      const row = this.rows[this.row];
      if (this.item < 0) return;
      const length = Math.max(row.lengths[this.item], 1);
      this.show(row.starts[this.item] - 2 * length, row.starts[this.item] + 3 * length);
    }

    // Drawing.

    draw() {
      const context = this.context;
      const { begin, end } = this.view;
      this.canvas.dataset.begin = begin;
      this.canvas.dataset.end = end;
      this.range.textContent = this.where();
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.fillStyle = this.paper;
      context.fillRect(0, 0, this.canvas.width, this.canvas.height);
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      const scale = (this.width - this.gutter) / (end - begin);
      const height = this.rowHeight();
      this.rows.forEach((row, number) => {
        const top = AXIS + number * height;
        const low = Math.max(lastBefore(row.starts, begin, 0, row.count), 0);
        const high = lastBefore(row.starts, end, 0, row.count) + 1;
        const taskHeight = height > 30 ? 22 : height - 3;
        context.fillStyle = this.lane;
        context.fillRect(this.gutter, top, this.width - this.gutter, taskHeight);
        if (high - low > (this.width - this.gutter) / 2) this.drawMean(row, top, taskHeight);
        else this.drawItems(row, low, high, top, taskHeight, scale);
        if (height > 30) this.drawLive(row, top + 23, 9, scale);
      });
      this.drawAxis(scale);
      this.drawLabels(height);
      this.drawSelection(scale, height);
    }

    drawItems(row, low, high, top, height, scale) {
      const context = this.context;
      const { begin } = this.view;
      for (let i = low; i < high; i++) {
        const x = this.gutter + (row.starts[i] - begin) * scale;
        const width = row.lengths[i] * scale;
        const from = Math.max(x, this.gutter);
        const shown = Math.min(x + width, this.width) - from;
        if (shown <= 0) continue;
        const idle = row.kinds[i] >= FIRST_IDLE;
        context.fillStyle = this.fills[row.kinds[i]] || this.faint;
        const inset = idle && height > 12 ? height * 0.3 : 0;
        context.fillRect(from, top + inset, shown > 2 && !idle ? shown - 0.5 : shown, height - 2 * inset);
        if (!idle && shown > 16 && height > 12 && row.kinds[i] < 3) {
          const text = String(row.microbatches[i]);
          context.font = "11px system-ui, sans-serif";
          context.fillStyle = "#fff";
          context.textAlign = "center";
          context.textBaseline = "middle";
          if (shown > 8 + 7 * text.length) context.fillText(text, from + shown / 2, top + height / 2 + 0.5);
        }
      }
    }

    // A row of pixels, each the mean colour of its time, stretched to the row's height.
    drawMean(row, top, height) {
      const pixels = Math.max(Math.round((this.width - this.gutter) * this.ratio), 1);
      if (this.strip.width !== pixels) {
        this.strip.width = pixels;
        this.strip.height = 1;
        this.stripContext = this.strip.getContext("2d", { willReadFrequently: true });
        this.image = this.stripContext.createImageData(pixels, 1);
      }
      const { begin, end } = this.view;
      const step = (end - begin) / pixels;
      const [reds, greens, blues] = row.sums;
      const { starts, lengths, count } = row;
      const target = this.image.data;
      const background = this.background;
      let index = lastBefore(starts, begin, 0, count);
      let before = [0, 0, 0];
      for (let x = 0; x <= pixels; x++) {
        const t = begin + x * step;
        // Steps first: the next item is mostly near.
        let reach = 1;
        while (index + reach < count && starts[index + reach] <= t) reach *= 2;
        index = lastBefore(starts, t, Math.max(index, 0), Math.min(index + reach + 1, count));
        let red = 0, green = 0, blue = 0;
        if (index >= 0) {
          const length = lengths[index];
          const part = length ? Math.min((t - starts[index]) / length, 1) : 1;
          red = reds[index] + part * (reds[index + 1] - reds[index]);
          green = greens[index] + part * (greens[index + 1] - greens[index]);
          blue = blues[index] + part * (blues[index + 1] - blues[index]);
        }
        if (x) {
          const place = 4 * (x - 1);
          target[place] = background[0] + (red - before[0]) / step;
          target[place + 1] = background[1] + (green - before[1]) / step;
          target[place + 2] = background[2] + (blue - before[2]) / step;
          target[place + 3] = 255;
        }
        before[0] = red;
        before[1] = green;
        before[2] = blue;
      }
      this.stripContext.putImageData(this.image, 0, 0);
      this.context.imageSmoothingEnabled = false;
      this.context.drawImage(this.strip, this.gutter, top, this.width - this.gutter, height);
    }

    // Activations held: the most in every pixel, as steps, below the tasks.
    drawLive(row, top, height, scale) {
      const { begin, end } = this.view;
      const times = row.liveAt;
      const count = times.length;
      if (!count) return;
      const context = this.context;
      let index = Math.max(lastBefore(times, begin, 0, count), 0);
      context.beginPath();
      context.moveTo(this.gutter, top + height);
      let pixel = -1, most = 0, level = 0;
      const y = (value) => top + height - (height * value) / row.mostLive;
      for (; index < count && times[index] <= end; index++) {
        const x = Math.max((times[index] - begin) * scale, 0);
        if (Math.floor(x) === pixel) {
          most = Math.max(most, row.live[index]);
          level = row.live[index];
          continue;
        }
        if (pixel >= 0) context.lineTo(this.gutter + pixel, y(most));
        context.lineTo(this.gutter + x, y(level));
        pixel = Math.floor(x);
        most = level = row.live[index];
        context.lineTo(this.gutter + x, y(level));
      }
      const last = index < count ? this.width : Math.min(this.width, this.gutter + (this.end - begin) * scale);
      context.lineTo(last, y(level));
      context.lineTo(last, top + height);
      context.closePath();
      context.fillStyle = this.liveInk;
      context.fill();
      if (row.limit) {
        context.fillStyle = this.faint;
        context.fillRect(this.gutter, y(row.limit), this.width - this.gutter, 1);
      }
    }

    drawAxis(scale) {
      const context = this.context;
      const { begin, end } = this.view;
      const rough = (end - begin) / Math.max((this.width - this.gutter) / 90, 2);
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || rough;
      context.font = "11px system-ui, sans-serif";
      context.textBaseline = "alphabetic";
      context.textAlign = "left";
      for (const [iteration, from, to] of this.data.batches) {
        if (to < begin || from > end) continue;
        const x = this.gutter + (from - begin) * scale;
        if (x >= this.gutter) {
          context.fillStyle = this.ink;
          context.fillRect(x, 2, 1, this.height);
        }
        const left = Math.max(x, this.gutter);
        const right = Math.min(this.gutter + (to - begin) * scale, this.width);
        const text = this.width < 600 ? String(iteration) : `iteration ${iteration}`;
        context.fillStyle = this.ink;
        if (right - left > 8 + 6 * text.length) context.fillText(text, left + 4, 13);
      }
      for (let t = Math.ceil(begin / step) * step; t <= end; t += step) {
        const x = this.gutter + (t - begin) * scale;
        context.fillStyle = this.faint;
        context.fillRect(x, 29, 1, 6);
        context.fillStyle = this.ink;
        const decimals = Math.max(0, Math.ceil(-Math.log10(step / 1e3) - 1e-9));
        const text = t < 0.5 ? "0" : (t / 1e3).toFixed(decimals) + " ms";
        if (x + 6 * text.length + 3 < this.width) context.fillText(text, x + 3, 32);
      }
    }

    drawLabels(height) {
      const context = this.context;
      context.fillStyle = this.paper;
      context.fillRect(0, 0, this.gutter, this.height);
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.font = (height > 16 ? "12px" : "10px") + " system-ui, sans-serif";
      this.rows.forEach((row, number) => {
        context.fillStyle = this.ink;
        const text = this.gutter < 50 ? row.label.replace("stage ", "s").replace(/ \(rank.*/, "") : row.label;
        context.fillText(text, 0, AXIS + number * height + (height > 30 ? 11 : height / 2 - 1));
      });
    }

    drawSelection(scale, height) {
      if (this.item < 0) return;
      const row = this.rows[this.row];
      const x = this.gutter + (row.starts[this.item] - this.view.begin) * scale;
      const width = Math.max(row.lengths[this.item] * scale, 2);
      const from = Math.max(x, this.gutter);
      const shown = Math.min(x + width, this.width) - from;
      if (shown <= 0) return;
      this.context.strokeStyle = this.ink;
      this.context.lineWidth = 2;
      const taskHeight = height > 30 ? 22 : height - 3;
      this.context.strokeRect(from, AXIS + this.row * height, shown, taskHeight);
    }
  }

  const made = [];
  for (const root of document.querySelectorAll(".timeline")) {
    made.push(new Timeline(root, JSON.parse(document.getElementById(root.id + "-data").textContent)));
  }
  if (made.length > 1) {
    const label = element("label", { class: "link" });
    const box = element("input", { type: "checkbox", checked: "" });
    label.append(box, " Move both timelines together");
    made[0].canvas.closest(".interactive").prepend(label);
    for (const timeline of made) {
      timeline.link = box;
      timeline.twins = made.filter((other) => other !== timeline);
    }
  }
})();
