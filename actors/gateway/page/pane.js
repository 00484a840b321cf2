// One answer on the screen: figures, canvas, timeline, and a slider that looks back. Model text is only ever text.

import { hue, Timeline } from "./timeline.js";
import { Trace } from "./trace.js";

const MASK = "\u00a0";

export class Pane {
  constructor(section) {
    section.append(document.getElementById("pane").content.cloneNode(true));
    this.section = section;
    this.canvas = section.querySelector(".canvas");
    this.figure = section.querySelector(".timeline");
    this.timeline = new Timeline(section.querySelector("svg"));
    this.slider = section.querySelector("input");
    this.moment = section.querySelector(".moment");
    this.details = section.querySelector(".text");
    this.pre = section.querySelector("pre");
    this.slider.setAttribute("aria-label", `Look back at ${section.querySelector("h2").textContent}`);
    this.slider.addEventListener("input", () => this.#lookBack(Number(this.slider.value)));
    this.clear();
  }

  clear() {
    this.trace = new Trace();
    this.elements = [];
    this.canvas.replaceChildren();
    this.canvas.setAttribute("aria-label", "The canvas: nothing is written yet.");
    this.section.removeAttribute("aria-busy");
    this.figure.hidden = this.details.hidden = true;
    this.pre.textContent = "";
    this.#figures();
  }

  /** A new answer begins, with so many masks to look at. */
  begin(masks) {
    this.clear();
    this.section.setAttribute("aria-busy", "true");
    this.trace.expect(masks);
    this.#grow();
  }

  take({ name, data }) {
    if (name === "canvas") this.#reveal(this.trace.canvas(data));
    else this.trace.chunk(data);
    this.pre.textContent = this.trace.text;
    this.details.hidden = !this.trace.text;
    this.#figures();
  }

  /** The answer is over, complete or not. */
  finish() {
    this.section.removeAttribute("aria-busy");
    const kept = this.trace.end?.tokens ?? this.trace.length;
    this.elements.forEach((element, position) => element.classList.toggle("cut", position >= kept));
    this.canvas.setAttribute("aria-label", this.#description());
    this.#figures();
  }

  /** Both timelines of the page share one scale: so many positions and forwards. */
  drawTimeline(positions, steps) {
    if (!this.trace.steps) return;
    this.figure.hidden = false;
    this.timeline.draw(this.trace, positions, steps, this.#description());
    this.slider.max = this.slider.value = this.trace.steps;
    this.#lookBack(this.trace.steps);
  }

  #description() {
    const { decided, steps, widest } = this.trace;
    const most = widest > 1 ? `, up to ${widest} of them in one` : "";
    return `${decided} tokens opened in ${steps} forwards${most}. ${this.trace.text}`;
  }

  #grow() {
    const { length } = this.trace;
    while (this.elements.length > length) this.elements.pop().remove();
    while (this.elements.length < length) {
      const element = document.createElement("span");
      this.elements.push(element);
      this.canvas.append(element);
      this.#draw(this.elements.length - 1, Infinity);
    }
  }

  #reveal(positions) {
    const below = this.canvas.scrollHeight - this.canvas.scrollTop - this.canvas.clientHeight;
    this.#grow();
    for (const position of positions) {
      this.#draw(position, Infinity);
      this.elements[position].classList.add("new");
    }
    if (below < 40) this.canvas.scrollTop = this.canvas.scrollHeight;
  }

  /** A cell as it was after forward `step`. */
  #draw(position, step) {
    const [element, cell] = [this.elements[position], this.trace.cells[position]];
    const cut = element.classList.contains("cut");
    const open = cell && cell.step <= step;
    element.className = "cell";
    element.classList.toggle("cut", cut);
    element.classList.toggle("opens-block", this.trace.blockStarts.has(position));
    element.classList.toggle("masked", !open);
    element.classList.toggle("part", Boolean(open && cell.joined && !cell.glyph));
    element.classList.toggle("small", Boolean(open && (isSpecial(cell.text) || (cell.part && !cell.joined))));
    element.textContent = open ? visible(cell.glyph) : MASK;
    element.title = open ? `${cell.text}\nforward ${cell.step}, certainty ${cell.confidence.toFixed(2)}` : "masked";
    if (open) element.style.setProperty("--hue", hue(cell.step));
  }

  #lookBack(step) {
    this.elements.forEach((_, position) => this.#draw(position, step));
    this.timeline.mark(step);
    this.moment.textContent = `forward ${step} of ${this.trace.steps}`;
    this.slider.setAttribute("aria-valuetext", this.moment.textContent);
  }

  #figures() {
    const { trace } = this;
    const perForward = trace.end?.perForward ?? (trace.steps ? trace.decided / trace.steps : null);
    this.#show("speed", trace.speed?.toFixed(1));
    this.#show("per_forward", perForward?.toFixed(2));
    this.#show("tokens", trace.end?.tokens ?? (trace.decided || null));
    this.#show("forwards", trace.end?.forwards ?? (trace.steps || null));
    this.#show("first", trace.firstText === null ? null : `${(trace.firstText / 1000).toFixed(2)} s`);
  }

  #show(name, value) {
    this.section.querySelector(`[data-figure="${name}"]`).textContent = value ?? "–";
  }
}

function isSpecial(text) {
  return /^<\|.*\|>$|^<\/?s>$/.test(text);
}

/** White space that can be seen, with the line breaks that it makes. */
function visible(glyph) {
  return glyph.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}
