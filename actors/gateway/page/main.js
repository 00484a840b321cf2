// The page: which models there are, what is asked, and both answers from their beginning to their end.

import { answer, models } from "./api.js";
import { Pane } from "./pane.js";

const EXAMPLES = [
  "Write the list backwards: ring, desk, wolf. End with 'Answer: a, b, c'.",
  "Sort from smallest to largest: 41, 7, 66, 23. End with 'Answer: a, b, c'.",
  "Explain in two sentences why the sky is blue.",
];
const MASKS = 32; // to look at before the first forward, where the model does not say its block

const byId = (id) => document.getElementById(id);
const panes = { diffusion: new Pane(byId("blocks")), ar: new Pane(byId("ar")) };
let known = []; // the served models
let running = null; // an AbortController

// ---------------------------------------------------------------------------------------------- the server's models
async function findModels() {
  problem(null);
  say("Asking which models are served …");
  try {
    known = await models(byId("key").value.trim());
  } catch (error) {
    known = [];
    say("");
    if (error.status === 401) {
      byId("key-row").hidden = false;
      byId("key").focus();
    }
    const silent = error.status === 401 && !byId("key").value;
    problem(silent ? new Error("This server asks for an API key: enter one above.") : error);
  }
  byId("model").replaceChildren(...known.map((model) => new Option(model.id, model.id)));
  choose();
}

function chosen() {
  return known.find((model) => model.id === byId("model").value);
}

/** Show what the chosen model can do. */
function choose() {
  const model = chosen();
  const adapted = Boolean(model?.block_diffusion);
  byId("write").disabled = !model;
  byId("blocks").hidden = Boolean(model) && !adapted;
  byId("threshold").disabled = !adapted;
  byId("served").textContent = model ? `${model.id}${adapted ? `, blocks of ${model.block_diffusion.block_size}` : ""}` : "";
  if (model) say(adapted ? "" : 'This model was not adapted to write blocks (no "block_diffusion" in its config.json): it writes token by token only.');
}

// ---------------------------------------------------------------------------------------------- one question
function fields(mode) {
  const prompt = byId("prompt").value;
  const asked = byId("plain").checked ? { prompt } : { messages: [{ role: "user", content: prompt }] };
  const threshold = byId("threshold").value;
  const diffusion = { mode, trace: true };
  if (mode === "diffusion" && threshold) diffusion.threshold = Number(threshold);
  const max_tokens = Number(byId("max_tokens").value);
  return { model: chosen().id, ...asked, max_tokens, stream: true, stream_options: { include_usage: true }, diffusion };
}

async function write() {
  if (running || !chosen()) return;
  running = new AbortController();
  const modes = chosen().block_diffusion ? ["diffusion", "ar"] : ["ar"];
  const inTurn = byId("in_turn").checked || modes.length === 1;
  problem(null);
  say("Writing …");
  busy(true);
  modes.forEach((mode) => panes[mode].clear());
  try {
    const asked = modes.map((mode) => [mode, fields(mode)]);
    if (inTurn) for (const [mode, body] of asked) await follow(mode, body);
    else await Promise.all(asked.map(([mode, body]) => follow(mode, body)));
    say(verdict(modes, inTurn));
  } catch (error) {
    const stopped = running.signal.aborted && error.name === "AbortError";
    running.abort();
    say(stopped ? "Stopped." : "");
    problem(stopped ? null : error);
  }
  modes.forEach((mode) => panes[mode].finish());
  drawTimelines(modes);
  running = null;
  busy(false);
}

async function follow(mode, body) {
  const pane = panes[mode];
  const path = byId("plain").checked ? "v1/completions" : "v1/chat/completions";
  pane.begin(mode === "ar" ? 1 : (chosen().block_diffusion?.block_size ?? MASKS));
  const request = { key: byId("key").value.trim(), signal: running.signal };
  for await (const event of answer(path, body, request)) pane.take(event);
}

function drawTimelines(modes) {
  const traces = modes.map((mode) => panes[mode].trace);
  const positions = Math.max(...traces.map((trace) => trace.length));
  const steps = Math.max(...traces.map((trace) => trace.steps));
  for (const mode of modes) panes[mode].drawTimeline(positions, steps);
}

/** What came of it, in a sentence. Speeds are compared only where neither answer slowed the other down. */
function verdict(modes, inTurn) {
  if (modes.length === 1) return "Done.";
  const [blocks, ar] = modes.map((mode) => panes[mode].trace);
  const ratio = (blocks.speed / ar.speed).toFixed(2);
  const speed = inTurn
    ? `Tokens/s of blocks over token by token: ${ratio}.`
    : "Both shared the engine: to compare tokens/s, run one after the other (Settings).";
  return (
    `Done: in blocks ${blocks.end.tokens} tokens took ${blocks.end.forwards} forwards, ` +
    `token by token ${ar.end.tokens} took ${ar.end.forwards}. ${speed}`
  );
}

// ---------------------------------------------------------------------------------------------- the page itself
function say(sentence) {
  byId("status").textContent = sentence;
}

function problem(error) {
  byId("problem").hidden = !error;
  byId("problem").textContent = error ? error.message : "";
}

function busy(is) {
  byId("write").disabled = is;
  byId("stop").disabled = !is;
  byId("model").disabled = is;
}

function stop() {
  running?.abort();
}

function example(prompt) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = prompt.length > 44 ? `${prompt.slice(0, 42)} …` : prompt;
  button.title = prompt;
  button.addEventListener("click", () => {
    byId("prompt").value = prompt;
    byId("prompt").focus();
  });
  return button;
}

byId("examples").append(...EXAMPLES.map(example));
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("settings").addEventListener("invalid", () => (byId("settings").open = true), true);
byId("model").addEventListener("change", choose);
byId("use-key").addEventListener("click", findModels);
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  findModels();
});
findModels();
