// The gateway's HTTP interface: which models there are, and an answer as a stream of events. Errors are sentences.

const SILENT = "The server does not answer: is it still running?";
const BROKEN = "The connection broke before the answer was complete: send it again.";

export class Refusal extends Error {
  /** What the server refused: its own sentence, and the HTTP status. */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The served models, as `GET /v1/models` lists them. */
export async function models(key) {
  const response = await send("v1/models", { headers: headers(key) });
  return (await response.json()).data;
}

/** Ask for a streamed answer and yield its events: {name, data}, a canvas has the name "canvas", a chunk has none. */
export async function* answer(path, body, { key, signal }) {
  const request = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await send(path, request);
  let whole = false;
  for await (const message of messages(response.body)) {
    whole = message.data === "[DONE]";
    if (whole) break;
    const data = JSON.parse(message.data);
    if (data.error) throw new Refusal(data.error.message, 500);
    yield { name: message.name, data };
  }
  if (!whole) throw new Error(BROKEN);
}

function headers(key) {
  const known = { "Content-Type": "application/json" };
  return key ? { ...known, Authorization: `Bearer ${key}` } : known;
}

async function send(path, request) {
  const response = await or(SILENT, fetch(path, request));
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const sentence = body?.error?.message ?? `The server answered with status ${response.status}.`;
  throw new Refusal(sentence, response.status);
}

/** What is awaited, or `sentence` as its error; whoever stopped it gets the AbortError. */
async function or(sentence, promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(sentence);
  }
}

/** Server-sent events of a body: their name ("" for none) and data. */
async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await or(BROKEN, reader.read());
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield message(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function message(part) {
  const found = { name: "", data: "" };
  for (const line of part.split("\n")) {
    const [field, value] = [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trimStart()];
    if (field === "event") found.name = value;
    if (field === "data") found.data += value;
  }
  return found;
}
