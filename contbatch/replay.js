// Plays a film (film.js): seats, queue, pages and tokens, step by step. Used by the widget and by saved pages.

const HOLDERS = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#CC79A7"]; // Okabe and Ito's
const WORK_COLOURS = ["#999999", "#E69F00", "#0072B2", "#D55E00"], HELD = 3;
const WORK_NAMES = ["sits the step out", "prompt", "answer, token by token", "finished, seat kept: wasted"];
const QUEUE_MARKS = ["", "✕ ", "⇄ "];
const SPEEDS = [1, 2, 5, 10, 20, 60];

const STYLE = `
.cb-replay { color: var(--jp-ui-font-color1, var(--vscode-editor-foreground, CanvasText)); font: 13px system-ui, sans-serif;
  background: var(--jp-layout-color0, var(--vscode-editor-background, Canvas)); padding: 6px; }
.cb-replay:focus-visible { outline: 2px solid #0072B2; }
.cb-replay .bar { display: flex; gap: 6px; align-items: center; flex-wrap: wrap; }
.cb-replay .bar input { flex: 1 1 12em; }
.cb-replay button, .cb-replay select { font: inherit; min-height: 28px; min-width: 32px; }
.cb-replay h4 { margin: 8px 0 2px; font: inherit; font-weight: 600; }
.cb-replay p { margin: 4px 0; }
.cb-replay canvas { display: block; }
.cb-replay .key { display: inline-block; margin-right: 1em; font-weight: 400; white-space: nowrap; }
.cb-replay .key canvas { display: inline-block; vertical-align: -2px; margin-right: 4px; }
.cb-replay .pages { max-height: 360px; overflow-y: auto; }
.cb-replay ol { display: flex; flex-wrap: wrap; gap: 3px; margin: 0; padding: 0; list-style: none; min-height: 24px; }
.cb-replay li { border: 1px solid currentColor; border-radius: 3px; padding: 1px 5px; }
.cb-replay li.x1, .cb-replay li.x2 { border-width: 2px; border-style: dashed; }
.cb-replay .answer { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 2.6em; max-height: 6em; overflow-y: auto; }
`;

// Show a film in an element. `start` is the first step shown; `onStop` is told the step whenever it stays for a while.
export function mount(parent, film, { start = 0, onStop = () => {} } = {}) {
  element("style", parent, {}, STYLE);
  const root = element("div", parent, { className: "cb-replay", tabIndex: 0 });
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "Replay of a run. Space plays and pauses, left and right arrows step, with shift ten steps, Home and End jump, up and down arrows choose a request.");
  const bar = element("div", root, { className: "bar" });
  const button = (text, label, act) => {
    const made = element("button", bar, { type: "button", title: label, onclick: act }, text);
    made.setAttribute("aria-label", label);
    return made;
  };
  const back = button("◀|", "One step back", () => seek(film.step - 1));
  const play = button("▶", "Play", () => toggle());
  const forth = button("|▶", "One step forward", () => seek(film.step + 1));
  const scrub = element("input", bar, { type: "range", min: 0, max: film.length - 1, step: 1, oninput: () => seek(Number(scrub.value)) });
  scrub.setAttribute("aria-label", "Step");
  const speed = element("select", bar, { title: "Speed" });
  speed.setAttribute("aria-label", "Speed");
  for (const rate of SPEEDS) element("option", speed, { value: rate, selected: rate === 10 }, `${rate} steps/s`);
  const clock = element("span", bar, { className: "clock" }); // no <output>: it would be read out at every step
  const status = element("p", root);
  status.setAttribute("role", "status");
  const section = (name, keys) => {
    const title = element("h4", root, {}, `${name} `);
    for (const [text, paint] of keys) {
      const key = element("span", title, { className: "key" });
      keysToPaint.push([element("canvas", key), paint]);
      key.append(text);
    }
    return title;
  };
  const keysToPaint = [];
  section("Seats", [...WORK_NAMES.map((name, kind) => [name, (pen) => pen.fillStyle = seatFill(pen, kind)]), ["empty", (pen) => pen.fillStyle = empty]]);
  const seats = element("canvas", root);
  const queueTitle = element("h4", root);
  const queue = element("ol", root);
  section("Pages", [["of one request, its colour", (pen) => pen.fillStyle = HOLDERS[1]], ["shared", (pen) => pen.fillStyle = pageFill(pen, SHARED)],
    ["cached", (pen) => pen.fillStyle = pageFill(pen, CACHED)], ["free", (pen) => pen.fillStyle = empty]]);
  const pages = element("canvas", element("div", root, { className: "pages" }));
  for (const canvas of [seats, pages]) canvas.setAttribute("role", "img");
  const answerTitle = element("h4", root);
  const answer = element("p", root, { className: "answer" });

  let chosen = -1, playing = false, due = 0, last = 0, frame = 0, ink = "black", empty = "#EEEEEE", paper = "white", columns = 1, cell = [0, 0], size = 1, across = 1;
  const seatFill = (pen, kind) => kind === HELD ? pattern(pen, "lines", WORK_COLOURS[HELD], paper) : WORK_COLOURS[kind];
  const pageFill = (pen, owner) => owner === FREE ? empty : owner === CACHED ? pattern(pen, "dots", "#888888", paper)
    : owner === SHARED ? pattern(pen, "cross", ink, "#999999") : HOLDERS[owner % HOLDERS.length];

  function drawSeats(width) {
    const n = film.seats.length, wide = n <= 16 ? 104 : n <= 64 ? 72 : 48;
    columns = Math.max(1, Math.min(n, Math.floor(width / wide)));
    cell = [Math.floor(width / columns), n <= 64 ? 38 : 26];
    const pen = resize(seats, columns * cell[0], Math.ceil(n / columns) * cell[1]);
    pen.clearRect(0, 0, width, seats.height);
    pen.font = "11px system-ui, sans-serif";
    for (let seat = 0; seat < n; seat++) {
      const request = film.seats[seat], kind = film.work[seat], [w, h] = [cell[0] - 2, cell[1] - 2];
      const x = (seat % columns) * cell[0], y = Math.floor(seat / columns) * cell[1];
      pen.fillStyle = request < 0 ? empty : seatFill(pen, kind);
      pen.fillRect(x, y, w, h);
      if (request < 0) continue;
      pen.save();
      pen.beginPath();
      pen.rect(x, y, w, h);
      pen.clip();
      pen.fillStyle = kind === HELD ? ink : onColour(WORK_COLOURS[kind]);
      if (kind === HELD) { pen.strokeStyle = paper; pen.lineWidth = 3; pen.strokeText(film.requests[request], x + 4, y + 13); }
      pen.fillText(film.requests[request], x + 4, y + 13);
      if (h > 30) pen.fillText(`${film.count(request)} ${film.lastToken(request)}`, x + 4, y + 29);
      pen.restore();
      if (request === chosen) { pen.strokeStyle = ink; pen.lineWidth = 3; pen.strokeRect(x + 1.5, y + 1.5, w - 3, h - 3); }
    }
  }

  function drawPages(width, changed) {
    const n = film.pages.length;
    const side = Math.max(3, Math.min(22, Math.floor(Math.sqrt(width * 240 / n))));
    if (side !== size || Math.floor(width / side) !== across) changed = null;
    [size, across] = [side, Math.floor(width / side)];
    const pen = resize(pages, across * size, Math.ceil(n / across) * size), gap = size > 4 ? 1 : 0;
    pen.font = "9px system-ui, sans-serif";
    for (const page of changed ?? film.pages.keys()) {
      const owner = film.pages[page], x = (page % across) * size, y = Math.floor(page / across) * size;
      pen.clearRect(x, y, size, size);
      pen.globalAlpha = chosen < 0 || owner === chosen || owner < 0 ? 1 : 0.3;
      pen.fillStyle = pageFill(pen, owner);
      pen.fillRect(x, y, size - gap, size - gap);
      pen.globalAlpha = 1;
      if (size >= 18 && owner >= 0 && film.requests[owner].length <= 3) {
        pen.fillStyle = chosen < 0 || owner === chosen ? onColour(HOLDERS[owner % HOLDERS.length]) : ink;
        pen.fillText(film.requests[owner], x + 2, y + size - 7);
      }
    }
  }

  function drawQueue() {
    const most = 60, waiting = film.queue.length;
    queueTitle.textContent = `Waiting (${waiting})${film.preempted.length ? `; preempted in this step: ${film.preempted.map((r) => film.requests[r]).join(", ")}` : ""}`;
    const shown = film.queue.slice(0, most).map((entry) => [QUEUE_MARKS[entry & 3] + film.requests[entry >> 2], entry & 3]);
    if (waiting > most) shown.push([`and ${waiting - most} more`, 0]);
    while (queue.children.length < shown.length) element("li", queue);
    while (queue.children.length > shown.length) queue.lastChild.remove();
    shown.forEach(([text, kind], i) => {
      const item = queue.children[i];
      if (item.textContent !== text) Object.assign(item, { textContent: text, title: QUEUE_NAMES[kind], className: `x${kind}` });
    });
  }

  function draw(changed = null) {
    if (!root.isConnected) return; // the watcher of its size draws it when it is
    const style = getComputedStyle(root), dark = !isDark(style.color), width = Math.max(200, root.clientWidth - 12);
    if (dark !== (paper !== "white")) changed = null;
    [ink, paper, empty] = dark ? ["#F5F5F5", "#1A1A1A", "#333333"] : ["#111111", "white", "#E6E6E6"];
    drawSeats(width);
    drawPages(width, changed);
    drawQueue();
    const speaker = chosen >= 0 ? chosen : film.seats.find((request) => request >= 0) ?? -1;
    answerTitle.textContent = speaker >= 0 ? `Answer of ${film.requests[speaker]}: ${film.count(speaker)} tokens` : "No answer yet";
    answer.textContent = speaker >= 0 ? film.answer(speaker, 300) : "";
    scrub.value = film.step;
    clock.textContent = `step ${film.step + 1} of ${film.length}, ${film.now[film.step].toFixed(3)} s`;
    scrub.setAttribute("aria-valuetext", clock.textContent);
    for (const [canvas, paint] of keysToPaint) { const pen = resize(canvas, 14, 14); paint(pen); pen.fillRect(0, 0, 14, 14); }
    const said = film.describe();
    if (!playing) { status.textContent = said; seats.setAttribute("aria-label", said); pages.setAttribute("aria-label", said); }
    status.style.visibility = playing ? "hidden" : "visible";
  }

  function show(step) { draw(film.go(Math.max(0, Math.min(film.length - 1, step)))); }
  function seek(step) { pause(); show(step); onStop(film.step); }
  function pause() {
    playing = false;
    cancelAnimationFrame(frame);
    play.textContent = "▶";
    play.setAttribute("aria-label", play.title = "Play");
  }
  function toggle() {
    if (playing) { seek(film.step); return; }
    if (film.step === film.length - 1) film.go(0);
    [playing, due, last] = [true, 0, performance.now()];
    play.textContent = "❚❚";
    play.setAttribute("aria-label", play.title = "Pause");
    frame = requestAnimationFrame(tick);
  }
  function tick(now) {
    due += Math.min(250, Math.max(0, now - last)) * Number(speed.value) / 1000; // no leap after a hidden tab
    last = now;
    const steps = Math.min(Math.floor(due), film.length - 1 - film.step);
    due -= Math.floor(due);
    if (steps > 0) show(film.step + steps);
    if (film.step === film.length - 1) seek(film.step); else frame = requestAnimationFrame(tick);
  }
  function choose(request) { chosen = request === chosen ? -1 : request; draw(); }

  seats.onclick = (event) => choose(film.seats[Math.floor(event.offsetY / cell[1]) * columns + Math.floor(event.offsetX / cell[0])] ?? -1);
  pages.onclick = (event) => choose(Math.max(-1, film.pages[Math.floor(event.offsetY / size) * across + Math.floor(event.offsetX / size)] ?? -1));
  root.onkeydown = (event) => {
    const own = event.target === scrub || event.target === speed; // they have keys of their own
    const far = event.shiftKey ? 10 : 1, seated = [...film.seats].filter((request) => request >= 0), at = seated.indexOf(chosen);
    const keys = {
      " ": () => toggle(), ArrowLeft: () => seek(film.step - far), ArrowRight: () => seek(film.step + far),
      Home: () => seek(0), End: () => seek(film.length - 1),
      ArrowDown: () => seated.length && choose(seated[(at + 1) % seated.length]),
      ArrowUp: () => seated.length && choose(seated[(at + seated.length - 1 + (at < 0)) % seated.length]),
      Escape: () => chosen >= 0 && choose(chosen),
    };
    if (own || (event.key === " " && event.target.tagName === "BUTTON") || !keys[event.key]) return;
    event.preventDefault();
    event.stopPropagation(); // else JupyterLab takes them for its own
    keys[event.key]();
  };
  const watcher = new ResizeObserver(() => draw());
  watcher.observe(root);
  const themes = new MutationObserver(() => draw());
  themes.observe(document.body, { attributes: true });
  const scheme = matchMedia("(prefers-color-scheme: dark)"), restyle = () => draw();
  scheme.addEventListener("change", restyle);
  show(start);
  return {
    show: (step) => { pause(); show(step); },
    close: () => { pause(); watcher.disconnect(); themes.disconnect(); scheme.removeEventListener("change", restyle); },
  };
}

const bytes = (view) => view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);

// The widget: what the kernel sends and is told.
export default {
  render({ model, el }) {
    const arrays = Object.fromEntries(["now", "bound", "starts", "changes"].map((name) => [name, bytes(model.get(name))]));
    const film = new Film(model.get("about"), arrays);
    const player = mount(el, film, {
      start: model.get("step"),
      onStop: (step) => { if (step !== model.get("step")) { model.set("step", step); model.save_changes(); } },
    });
    const follow = () => { if (model.get("step") !== film.step) player.show(model.get("step")); };
    model.on("change:step", follow);
    return () => { model.off("change:step", follow); player.close(); };
  },
};

// A saved page: the arrays one after the other, zipped, as base64.
export async function openPage(parent, { about, sizes, data }) {
  const zipped = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const whole = await new Response(new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  let at = 0;
  const arrays = Object.fromEntries(sizes.map(([name, size]) => [name, whole.slice(at, (at += size))]));
  return mount(parent, new Film(about, arrays));
}
