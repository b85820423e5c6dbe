
"use strict";
const $ = (id) => document.getElementById(id);
const percent = (part) => Math.round(100 * part) + " %";
const SILENT = "The server does not answer.";
const ENDS = { stop: "Complete.", length: "Ended at the limit of tokens.", tool_calls: "Waits for the results of tools.",
  content_filter: "Ended by a filter." };
const rate = (value) => value == null ? "–" : value.toFixed(1) + " tokens/s";
const MOST_CHATS = 50, REDRAW_MS = 400;
let running = null, drawn = "", refused = false, lost = false;
let name = "", context = Infinity, held = 0;

/* -- chats, kept in this browser ------------------------------------------------------------------- */

const stored = (() => {
  try { return JSON.parse(localStorage.getItem("heterollm.chats")) ?? []; } catch { return []; }
})();
let chats = Array.isArray(stored) ? stored.filter((one) => Array.isArray(one?.messages)) : [];
let chat = { messages: [] };

function keep() {
  if (chat.messages.length && !chats.includes(chat)) chats.unshift(chat);
  chats = chats.filter((one) => one.messages.length).slice(0, MOST_CHATS);
  for (let count = chats.length; ; count = Math.floor(count / 2)) {
    try { localStorage.setItem("heterollm.chats", JSON.stringify(chats.slice(0, count))); break; }
    catch { if (!count) break; }  /* full, or not allowed: the oldest chats are not kept */
  }
  listChats();
}

function listChats() {
  $("chats").replaceChildren(...chats.map((one) => {
    const row = element("li", one === chat ? "chosen" : "");
    const first = one.messages.find((message) => message.role === "user")?.content ?? "";
    row.append(action(first.slice(0, 60) || "…", () => openChat(one)), action("×", () => {
      chats = chats.filter((other) => other !== one);
      if (one === chat) openChat({ messages: [] });
      keep();
    }, "Delete"));
    return row;
  }));
}

function openChat(one) {
  running?.abort();
  chat = one; held = 0;
  $("talk").replaceChildren();
  chat.messages.forEach((message) => say(message));
  listChats();
  $("input").focus();
}

/* -- messages ---------------------------------------------------------------------------------------- */

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function action(text, call, title = "") {
  const made = element("button", "", text);
  made.type = "button"; made.title = title;
  made.addEventListener("click", call);
  return made;
}

/* The server draws Markdown, in which HTML of a model is text; without its answer text stays text. */
async function markdown(text) {
  try {
    const response = await fetch("markdown", { method: "POST", headers: headers(), body: JSON.stringify({ text }) });
    return response.ok ? (await response.json()).html : null;
  } catch { return null; }
}

/* Draws a message: the first characters as HTML if they are drawn, the rest as text. */
function show(box, message, html = "", count = 0) {
  const open = box.querySelector("details.thought")?.open;
  box.replaceChildren();
  if (message.reasoning_content) {
    const fold = element("details", "dim thought plain");
    fold.open = open ?? true;
    fold.append(element("summary", "", "Reasoning"), message.reasoning_content);
    box.append(fold);
  }
  const body = element("div");
  body.innerHTML = html;
  for (const link of body.querySelectorAll("a")) { link.target = "_blank"; link.rel = "noopener noreferrer"; }
  box.append(body, element("div", "plain", (message.content ?? "").slice(count)));
  for (const call of message.tool_calls ?? []) {
    const step = element("div", "step");
    step.append(element("b", "", call.function.name), element("pre", "", call.function.arguments));
    box.append(step);
  }
  if (message.note) box.append(element("span", "dim", message.note));
}

async function settle(box, message) {
  const text = message.content ?? "";
  const html = message.role === "assistant" && text ? await markdown(text) : null;
  show(box, message, html ?? "", html === null ? 0 : text.length);
  const tools = element("div", "tools");
  tools.append(action("Copy", () => navigator.clipboard?.writeText(text)));
  if (message.role === "user") tools.append(action("Edit", () => { if (cut(message)) $("input").value ||= text; }));
  if (message.role === "assistant") tools.append(action("Retry", () => { if (cut(message)) answer(); }));
  box.append(tools);
}

/* Removes a message and all behind it. */
function cut(message) {
  const at = chat.messages.indexOf(message);
  if (running || at < 0) return false;
  chat.messages.splice(at); keep(); openChat(chat);
  return true;
}

function say(message, ended = true) {
  if (message.role === "tool") {
    const step = element("div", "said step");
    step.append(element("span", "dim", "Result"), element("pre", "", message.content));
    $("talk").append(step);
    return step;
  }
  const box = element("div", "said " + message.role);
  show(box, message);
  $("talk").append(box);
  $("talk").scrollTop = $("talk").scrollHeight;
  if (ended) settle(box, message);
  return box;
}

/* Asks for the results of a message's calls, and goes on with them. */
function askResults(message) {
  const box = element("div", "said step"), fields = message.tool_calls.map((call) => {
    const label = element("label", "", `Result of ${call.function.name} `), field = element("textarea");
    label.append(field); box.append(label);
    return [call.id, field];
  });
  box.append(action("Send results", () => {
    if (running) return;
    box.remove();
    for (const [id, field] of fields) {
      const result = { role: "tool", tool_call_id: id, content: field.value };
      chat.messages.push(result); say(result);
    }
    answer();
  }));
  $("talk").append(box);
}

/* -- answers ----------------------------------------------------------------------------------------- */

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

/* The error of a response; without a key that the server takes, the field for one opens. */
async function failure(response) {
  if (response.status === 401 && !refused) { refused = true; $("settings").open = true; $("key").focus(); }
  try { return (await response.json()).error; } catch { return { message: `The server answered ${response.status}.` }; }
}

/* Asks for an answer; where the context is full, the dialogue loses its oldest turns. */
async function ask() {
  const system = $("system").value.trim(), tools = $("tools").value.trim();
  for (;;) {
    const sent = chat.messages.map(({ note, ...message }) => message);
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({
        model: name, stream: true, temperature: Number($("temperature").value),
        max_tokens: Number($("most").value) || 512, ...(tools ? { tools: parsed(tools) } : {}),
        messages: system ? [{ role: "system", content: system }, ...sent] : sent }) });
    if (response.ok) return response;
    const error = await failure(response);
    if (error.code !== "context_length_exceeded" || !forget()) throw new Error(error.message);
  }
}

function parsed(tools) {
  try { return JSON.parse(tools); } catch (error) { throw new Error(`The tools in the settings: ${error.message}`); }
}

/* Drops the oldest turn, up to the next message of the user. */
function forget() {
  const next = chat.messages.findIndex((message, at) => at && message.role === "user");
  if (next < 1) return false;
  chat.messages.splice(0, next);
  return lost = true;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

/* Adds what an event brings to a message. */
function take(message, choice) {
  const delta = choice?.delta ?? {};
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const own = message.tool_calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } };
    own.function.name += call.function?.name ?? "";
    own.function.arguments += call.function?.arguments ?? "";
  }
  if (choice?.finish_reason) message.note = ENDS[choice.finish_reason] ?? choice.finish_reason;
}

/* Draws a message that grows: at most once a frame, and its Markdown seldom, as the model may need the cores. */
function painter(box, message) {
  let waits = false, ended = false, html = "", count = 0, asked = 0;
  const draw = async () => {
    waits = false;
    if (ended) return;
    const low = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 80;
    show(box, message, html, count);
    if (low) $("talk").scrollTop = $("talk").scrollHeight;
    if (performance.now() - asked < REDRAW_MS) return;
    asked = Infinity;
    const text = message.content, found = await markdown(text);
    if (found !== null) { html = found; count = text.length; }
    asked = performance.now();
  };
  return {
    draw() { if (!waits) { waits = true; requestAnimationFrame(draw); } },
    end() { ended = true; },
  };
}

async function send() {
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  const asked = { role: "user", content: text };
  chat.messages.push(asked);
  say(asked);
  await answer();
}

/* Answers the dialogue; a message without an answer goes back to its field. */
async function answer() {
  running = new AbortController();
  $("send").hidden = true; $("stop").hidden = false;
  const own = chat, message = { role: "assistant", content: "" };
  lost = false;
  if (!name) await look();
  /* The answer needs room, too. */
  if (held > 0.75 * context) forget();
  const box = say({ ...message, content: "…" }, false), paint = painter(box, message);
  let timings = null, problem = "";
  try {
    for await (const chunk of events(await ask())) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(message, chunk.choices[0]);
      timings = chunk.timings ?? timings;
      paint.draw();
    }
  } catch (error) {
    problem = error.name === "AbortError" ? "Stopped." : error instanceof TypeError ? SILENT : error.message;
  }
  running = null;
  $("send").hidden = false; $("stop").hidden = true;
  paint.end();
  const said = message.content || message.reasoning_content || message.tool_calls || !problem;
  message.note = [problem || message.note, lost ? "The context is full: the model no longer sees the oldest turns." : "",
    timings ? `${timings.decode_tokens + 1} tokens at ${rate(timings.decode_tokens_per_s)}.` : ""].filter(Boolean).join(" ");
  if (timings) held = timings.cached_tokens + timings.prefill_tokens + timings.decode_tokens;
  if (timings) $("last").textContent = `${timings.prefill_tokens} tokens of the prompt at ${rate(timings.prefill_tokens_per_s)}, ` +
    `${timings.cached_tokens} reused; ${timings.decode_tokens + 1} tokens at ${rate(timings.decode_tokens_per_s)}` +
    (timings.time_kind === "real" ? "." : ` (${timings.time_kind} time).`);
  const last = own.messages.at(-1);
  if (said) own.messages.push(message);
  else if (last.role === "user") { own.messages.pop(); $("input").value ||= last.content; }
  keep();
  if (own !== chat) return;
  if (said) await settle(box, message); else box.replaceChildren(element("span", "failed", problem));
  if (message.tool_calls) askResults(message);
  $("input").focus();
}

/* -- the engine -------------------------------------------------------------------------------------- */

function bar(share) {
  const made = element("div", "bar"), gpu = element("i", "gpu"), npu = element("i", "npu");
  gpu.style.width = 100 * (1 - share) + "%"; npu.style.width = 100 * share + "%";
  made.append(gpu, npu);
  made.title = `GPU ${percent(1 - share)}, NPU ${percent(share)}`;
  return made;
}

function drawLayers(shares) {
  const { prefill, decode } = shares;
  const said = ({ npu }) => npu === 0 ? "the GPU alone" : npu === 1 ? "the NPU alone" :
    `GPU ${percent(1 - npu)}, NPU ${percent(npu)}`;
  $("shares").textContent = `A prompt of ${prefill.tokens}: ${said(prefill)}. A token: ${said(decode)}.`;
  $("prompts").textContent = `prompt of ${prefill.tokens}`;
  $("rows").replaceChildren();
  prefill.layers.forEach((one, number) => {
    const row = element("tr"), left = element("td", "wide"), right = element("td", "wide");
    left.append(bar(one.npu)); right.append(bar(decode.layers[number].npu));
    row.append(element("td", "", one.layer), left, right);
    $("rows").append(row);
  });
}

function drawProcessors(found) {
  const box = $("processors");
  box.replaceChildren();
  if (!found) { box.append(element("div", "dim", "heterollm serve --live shows how busy GPU and NPU are.")); return; }
  for (const [phase, own] of Object.entries(found)) {
    box.append(element("div", "dim", `${phase}: GPU ${percent(own.gpu)}, NPU ${percent(own.npu)} busy, both at once ` +
      `${percent(own.both)} of the time of ${own.passes} traced passes`));
    for (const name of ["gpu", "npu"]) {
      const made = element("div", "bar"), part = element("i", name);
      part.style.width = 100 * own[name] + "%";
      made.append(part); box.append(made);
    }
  }
}

/* Offers the models of a server of several. */
async function listModels() {
  const response = await fetch("v1/models", { headers: headers() });
  const names = response.ok ? (await response.json()).data.map((one) => one.id) : [];
  $("models").replaceChildren(...names.map((one) => element("option", "", one)));
  $("models").hidden = names.length < 2;
}

async function look() {
  if (document.hidden || refused) return;
  try {
    if (!$("models").length) await listModels();
    const chosen = $("models").value;
    const response = await fetch("status" + (chosen ? "?model=" + encodeURIComponent(chosen) : ""), { headers: headers() });
    if (!response.ok) { $("load").textContent = (await failure(response)).message; return; }
    const found = await response.json();
    if (found.loaded === false) {
      $("model").textContent = document.title = name = found.model;
      $("what").textContent = "not loaded: the first message loads it"; $("load").textContent = "";
      return;
    }
    $("model").textContent = document.title = name = found.model;
    context = found.context;
    $("what").textContent = `${found.device}, plan ${found.plan}, ${found.precision}, context ${found.context}` +
      (found.time_kind === "real" ? "" : `, ${found.time_kind} time`);
    $("load").textContent = `${found.running} running, ${found.waiting} waiting` +
      (found.failures.length ? "; " + found.failures[found.failures.length - 1] : "");
    if (drawn !== name) { drawn = name; drawLayers(found.shares); }
    const recent = found.recent;
    if (recent.engine) {
      $("prefill").style.width = 100 * recent.engine.prefill + "%";
      $("decode").style.width = 100 * recent.engine.decode + "%";
      $("engine").textContent = `Last ${recent.seconds.toFixed(1)} s: prompts ${percent(recent.engine.prefill)}, ` +
        `answers ${percent(recent.engine.decode)} of the time; ${recent.engine.decode_tokens} tokens`;
      if (!recent.processors || Object.keys(recent.processors).length) drawProcessors(recent.processors);
    }
  } catch { $("load").textContent = SILENT; }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("models").addEventListener("change", () => { context = Infinity; held = 0; look(); });
$("new").addEventListener("click", () => openChat({ messages: [] }));
$("key").addEventListener("change", () => { refused = false; look(); });
listChats();
look();
setInterval(look, 1000);
