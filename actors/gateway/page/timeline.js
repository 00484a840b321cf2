// Which position opened at which forward: positions to the right, forwards downwards, one colour a forward.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDE = 120; // marks are at least a WIDE-th of the width and a HIGH-th of the height
const HIGH = 60;
const HUES = 7; // forwards that can be told apart by colour

/** The colour of a forward, in degrees: those that follow one another look different. */
export function hue(step) {
  return Math.round((40 + (360 / HUES) * 3 * step) % 360);
}

export class Timeline {
  constructor(svg) {
    this.svg = svg;
  }

  draw(trace, positions, steps, description) {
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${positions} ${steps}`);
    this.svg.setAttribute("aria-label", `Timeline: ${description}`);
    for (const start of trace.blockStarts) if (start) this.#line(start, 0, start, steps);
    const kept = trace.end?.tokens ?? Infinity;
    for (const cell of trace.cells) if (cell) this.#mark(cell, positions, steps, cell.position >= kept);
    this.now = this.#line(0, 0, positions, 0, "now");
  }

  /** A line below what forward `step` opened. */
  mark(step) {
    for (const end of ["y1", "y2"]) this.now.setAttribute(end, step);
  }

  #mark(cell, positions, steps, cut) {
    const box = { x: cell.position, y: cell.step - 1, width: Math.max(1, positions / WIDE), height: Math.max(1, steps / HIGH) };
    const mark = this.#add("rect", box, cut ? "cut" : "");
    mark.style.setProperty("--hue", hue(cell.step));
    const title = document.createElementNS(NAMESPACE, "title");
    title.textContent = `position ${cell.position + 1}, forward ${cell.step}, certainty ${cell.confidence.toFixed(2)}: ${cell.text}`;
    mark.append(title);
  }

  #line(x1, y1, x2, y2, kind = "") {
    return this.#add("line", { x1, y1, x2, y2 }, kind);
  }

  #add(name, attributes, kind) {
    const element = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (kind) element.setAttribute("class", kind);
    this.svg.append(element);
    return element;
  }
}
