// What is known of one answer while it is written: which position holds which token, since which forward, and figures.
// No drawing here. Positions are counted from the answer's first token.

const PART = /^bytes:((?:\\x[0-9a-f]{2})+)$/;

export class Trace {
  constructor() {
    this.cells = []; // by position: {position, text, glyph, part, confidence, step}, a hole where masked
    this.length = 0; // positions that are on the canvas, masked or not
    this.blockStarts = new Set();
    this.steps = 0; // forwards that decided something
    this.decided = 0;
    this.text = ""; // final text
    this.end = null; // {tokens, forwards, perForward, reason} when the answer is complete
    this.begun = performance.now();
    this.firstText = null; // milliseconds
    this.seconds = 0; // until the last event
  }

  /** Masks to look at before the first forward has come back. */
  expect(count) {
    this.length = count;
  }

  /** What a forward decided; returns the positions that look different now. */
  canvas(event) {
    if (!this.steps) this.length = 0;
    this.steps += 1;
    const begin = event.block_start - event.prompt_tokens;
    this.length = Math.max(this.length, begin + event.block_size);
    if (event.block_size > 1) this.blockStarts.add(Math.max(0, begin));
    const changed = new Set();
    for (const reveal of event.reveals) {
      const position = reveal.position - event.prompt_tokens;
      const part = bytesOf(reveal.text);
      const glyph = part ? hex(part) : reveal.text;
      const { text, confidence } = reveal;
      this.decided += this.cells[position] ? 0 : 1; // an answer that another engine continues repeats some
      this.cells[position] = { position, text, glyph, part, joined: false, confidence, step: this.steps };
      changed.add(position);
      if (part) this.#join(position).forEach((near) => changed.add(near));
    }
    this.#clock();
    return changed;
  }

  /** A chunk of the stream: final text, or the figures at the end. */
  chunk(data) {
    const choice = data.choices[0];
    const piece = choice?.delta?.content ?? choice?.text ?? "";
    if (piece) {
      this.text += piece;
      this.firstText ??= performance.now() - this.begun;
      this.#clock();
    }
    if (data.diffusion) {
      const { denoise, commit } = data.diffusion.forwards;
      const perForward = data.diffusion.tokens_per_forward;
      this.end = { tokens: null, forwards: denoise + commit, perForward, reason: choice.finish_reason };
    }
    if (data.usage && this.end) this.end.tokens = data.usage.completion_tokens;
  }

  get speed() {
    return this.seconds ? (this.end?.tokens ?? this.decided) / this.seconds : null;
  }

  /** The most positions that one forward opened. */
  get widest() {
    const counts = new Map();
    for (const cell of this.cells.filter(Boolean)) counts.set(cell.step, (counts.get(cell.step) ?? 0) + 1);
    return Math.max(0, ...counts.values());
  }

  #clock() {
    this.seconds = (performance.now() - this.begun) / 1000;
  }

  /** Parts of a character show it as a whole once they all stand side by side. Returns the positions of the run. */
  #join(position) {
    let [begin, end] = [position, position + 1];
    while (this.cells[begin - 1]?.part) begin -= 1;
    while (this.cells[end]?.part) end += 1;
    const run = this.cells.slice(begin, end);
    for (let i = 0; i < run.length; i += 1) {
      const count = this.#characterAt(run, i);
      for (let k = i + 1; k < i + count; k += 1) Object.assign(run[k], { glyph: "", joined: true });
      i += Math.max(0, count - 1);
    }
    return run.map((cell) => cell.position);
  }

  /** How many cells from `first` on make whole characters (0: none do); the first of them then shows these. */
  #characterAt(run, first) {
    let bytes = [];
    for (let last = first; last < run.length; last += 1) {
      bytes = [...bytes, ...run[last].part];
      try {
        run[first].glyph = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
        run[first].joined = true;
        return last - first + 1;
      } catch {
        continue; // not whole yet
      }
    }
    return 0;
  }
}

/** The bytes of a token that is a part of a character, as the server writes them; null for any other. */
function bytesOf(text) {
  const found = PART.exec(text);
  return found && found[1].match(/[0-9a-f]{2}/g).map((digits) => parseInt(digits, 16));
}

function hex(bytes) {
  return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
