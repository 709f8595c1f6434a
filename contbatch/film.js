// A run as changes, step by step (contbatch/film.py). replay.js draws it; the two are read as one script.

const SEAT = 0, WORK = 1, PAGE = 2, ENTER = 3, LEAVE = 4, TOKEN = 5, GONE = 6;
const FREE = -1, CACHED = -2, SHARED = -3;
const QUEUE_NAMES = ["", "preempted", "swapped out"];

export class Film {
  // Holds the state while a step runs; earlier ones come back from keyframes, so memory grows with steps / KEY · pages.
  constructor(about, arrays) {
    Object.assign(this, about); // settings, requests, texts
    this.now = new Float64Array(arrays.now);
    this.bound = new Uint8Array(arrays.bound);
    this.starts = new Int32Array(arrays.starts);
    this.changes = new Int32Array(arrays.changes);
    this.length = this.now.length;
    this.every = Math.max(64, Math.ceil(Math.sqrt(this.length)));
    this.keyframes = [];
    this.tokens = new Map(); // request: [step, token, step, token, …]
    for (let step = 0; step < this.length; step++) {
      for (let i = 3 * this.starts[step]; i < 3 * this.starts[step + 1]; i += 3) {
        if (this.changes[i] !== TOKEN) continue;
        const request = this.changes[i + 1];
        if (!this.tokens.has(request)) this.tokens.set(request, []);
        this.tokens.get(request).push(step, this.changes[i + 2]);
      }
    }
    this.rewind();
  }

  rewind() {
    this.step = -1;
    this.seats = new Int32Array(this.settings.max_num_seqs).fill(-1);
    this.work = new Uint8Array(this.settings.max_num_seqs);
    this.pages = new Int32Array(this.settings.num_pages).fill(FREE);
    this.queue = [];
    this.numGone = 0;
  }

  // Go to a step; returns the pages that changed, or null if any may have.
  go(step) {
    const isNext = step === this.step + 1;
    const key = this.keyframes[Math.floor(step / this.every)];
    if (step < this.step || (key && key.step > this.step)) {
      if (key) Object.assign(this, key, { seats: key.seats.slice(), work: key.work.slice(), pages: key.pages.slice(), queue: key.queue.slice() });
      else this.rewind();
    }
    const changed = [];
    while (this.step < step) this.advance(changed);
    return isNext ? changed : null;
  }

  advance(changed) {
    this.step++;
    this.preempted = [];
    for (let i = 3 * this.starts[this.step]; i < 3 * this.starts[this.step + 1]; i += 3) {
      const where = this.changes[i + 1], which = this.changes[i + 2];
      switch (this.changes[i]) {
        case SEAT: this.seats[where] = which; break;
        case WORK: this.work[where] = which; break;
        case PAGE: this.pages[where] = which; changed.push(where); break;
        case ENTER: this.queue.splice(where, 0, which); if (which & 3) this.preempted.push(which >> 2); break;
        case LEAVE: this.queue.splice(where, 1); break;
        case GONE: this.numGone++; break;
      }
    }
    if (this.step % this.every === 0 && !this.keyframes[this.step / this.every]) {
      const { step, seats, work, pages, queue, numGone, preempted } = this;
      this.keyframes[step / this.every] = { step, numGone, preempted, seats: seats.slice(), work: work.slice(), pages: pages.slice(), queue: queue.slice() };
    }
  }

  // How many tokens a request has when the step has run.
  count(request) {
    const tokens = this.tokens.get(request) ?? [];
    let low = 0, high = tokens.length / 2;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tokens[2 * middle] <= this.step) low = middle + 1; else high = middle;
    }
    return low;
  }

  text(token) { return this.texts ? this.texts[token] : `${token} `; }

  lastToken(request) {
    const n = this.count(request);
    return n ? this.text(this.tokens.get(request)[2 * n - 1]) : "";
  }

  answer(request, most) {
    const n = this.count(request), first = Math.max(0, n - most), words = first ? ["… "] : [];
    for (let i = first; i < n; i++) words.push(this.text(this.tokens.get(request)[2 * i + 1]));
    return words.join("");
  }

  describe() {
    const { seats, pages, queue, settings } = this;
    const taken = seats.reduce((n, request) => n + (request >= 0), 0);
    let free = 0, cached = 0, shared = 0;
    for (const owner of pages) { free += owner === FREE; cached += owner === CACHED; shared += owner === SHARED; }
    const waits = [0, 0, 0];
    for (const entry of queue) waits[entry & 3]++;
    const back = QUEUE_NAMES.slice(1).map((name, i) => waits[i + 1] && `${waits[i + 1]} ${name}`).filter(Boolean).join(", ");
    const limits = this.limits.filter((_, i) => this.bound[this.step] & (1 << i)).join(", ");
    return `${taken} of ${seats.length} seats taken, ${queue.length} waiting${back && ` (${back})`}, ${this.numGone} gone. ` +
      `${pages.length - free - cached} of ${pages.length} pages held${shared ? `, ${shared} of them shared` : ""}` +
      `${settings.prefix_cache ? `, ${cached} cached` : ""}.${limits && ` Not enough ${limits}.`}`;
  }
}
