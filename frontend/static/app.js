// The chat page: ties the conversation, the view, the settings and the server together.

import { ApiError, apiKey, firstModel, readiness, streamReply } from "./api.js";
import { byId } from "./dom.js";
import { Settings } from "./settings.js";
import { loadConversation, requestBody, saveConversation } from "./store.js";
import { View } from "./view.js";

const PHASES = { start: "Starting", fetch: "Fetching the model", weights: "Reading the weights", prepare: "Preparing", warmup: "Warming up" };

class Chat {
  constructor() {
    this.messages = loadConversation();
    this.model = null;
    this.ready = false;
    this.running = null; // AbortController of the reply that streams
    this.editing = false;
    this.settings = new Settings();
    this.view = new View({ regenerate: () => this.regenerate(), edit: () => this.beginEdit() });
    this.input = byId("input");
    this.wire();
    this.refresh();
    this.connect();
  }

  wire() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.input.value);
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(this.input.value);
    });
    this.input.addEventListener("input", () => this.sizeInput());
    byId("stop").addEventListener("click", () => this.stop());
    byId("cancel-edit").addEventListener("click", () => this.endEdit());
    byId("new-chat").addEventListener("click", () => this.reset());
    byId("problem-retry").addEventListener("click", () => this.retry());
    byId("key-form").addEventListener("submit", (event) => this.useKey(event));
    for (const button of byId("suggestions").children) button.addEventListener("click", () => this.send(button.textContent));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (this.running) this.stop();
      else this.endEdit();
    });
  }

  // --- the server's state -----------------------------------------------------------------------------------

  /** Waits until the server is ready, showing how far it is; then asks for the model. */
  async connect() {
    if (this.connecting) return;
    this.connecting = true;
    this.ready = false;
    for (let state = await readiness(); !state.ready; state = await readiness()) {
      this.showLoading(state);
      await new Promise((wake) => setTimeout(wake, state.reachable ? 400 : 1500));
    }
    byId("loading").hidden = true;
    this.ready = true;
    this.connecting = false;
    await this.askForModel();
  }

  async askForModel() {
    try {
      this.model = await firstModel();
      byId("model").textContent = this.model.id;
      document.title = `${this.model.id} · Pagemill`;
    } catch (error) {
      this.showProblem(error);
    }
    this.refreshControls();
  }

  showLoading({ reachable, status, phase, progress, detail }) {
    byId("loading").hidden = false;
    const title = !reachable ? "The server does not answer." : status === "draining" ? "The server is shutting down." : (PHASES[phase] ?? phase ?? "Starting");
    byId("loading-title").textContent = title;
    byId("loading-detail").textContent = reachable ? [percent(progress), detail].filter(Boolean).join(" · ") : "It is asked again every moment.";
    const bar = byId("loading-progress");
    bar.hidden = !reachable;
    if (progress === null || progress < 0) bar.removeAttribute("value");
    else bar.value = progress;
    this.refreshControls();
  }

  useKey(event) {
    event.preventDefault();
    apiKey.set(byId("key").value.trim());
    byId("key").value = "";
    byId("key-form").hidden = true;
    if (this.needsReply()) this.respond();
    if (!this.model) this.askForModel();
    this.input.focus();
  }

  // --- what the reader does -----------------------------------------------------------------------------------

  send(text) {
    if (!text.trim() || this.running || !this.ready) return;
    if (this.editing) this.messages.splice(this.lastOwn());
    else if (this.needsReply()) this.messages.pop(); // was never answered, and is said again in other words
    this.endEdit();
    this.messages.push({ role: "user", content: text.trim() });
    this.input.value = "";
    this.sizeInput();
    this.view.follow();
    this.respond();
  }

  stop() {
    this.running?.abort();
  }

  regenerate() {
    if (this.running || !this.ready) return;
    this.messages.splice(this.lastOwn() + 1);
    this.respond();
  }

  retry() {
    byId("problem").hidden = true;
    if (!this.model) this.askForModel();
    if (this.needsReply()) this.respond();
    else if (this.messages.at(-1)?.role === "assistant") this.regenerate();
  }

  beginEdit() {
    this.editing = true;
    this.input.value = this.messages[this.lastOwn()].content;
    byId("editing").hidden = false;
    this.sizeInput();
    this.input.focus();
  }

  endEdit() {
    if (!this.editing) return;
    this.editing = false;
    this.input.value = "";
    byId("editing").hidden = true;
    this.sizeInput();
  }

  reset() {
    this.stop();
    this.endEdit();
    this.messages = [];
    byId("problem").hidden = true;
    saveConversation(this.messages);
    this.refresh();
    this.input.focus();
  }

  lastOwn() {
    return this.messages.findLastIndex(({ role }) => role === "user");
  }

  needsReply() {
    return this.messages.at(-1)?.role === "user";
  }

  // --- a reply -------------------------------------------------------------------------------------------------

  /** Streams the reply to the conversation as it stands. */
  async respond() {
    const conversation = this.messages;
    const body = requestBody(this.model?.id, conversation, this.settings.values);
    const reply = { role: "assistant", content: "", stats: null, note: "" };
    const controller = (this.running = new AbortController());
    conversation.push(reply);
    byId("problem").hidden = true;
    this.refresh();
    const meter = new Meter();
    const redraw = oncePerFrame(() => {
      if (this.messages === conversation) this.view.update(reply);
    });
    try {
      const reason = await streamReply(body, {
        signal: controller.signal,
        onText: (text) => {
          reply.content += text;
          reply.stats = meter.text();
          redraw();
        },
        onUsage: (usage) => (reply.stats = meter.usage(usage)),
      });
      if (reason === "length") reply.note = "Cut off at the longest length allowed";
    } catch (error) {
      this.endWith(error, reply, conversation);
    }
    if (this.running === controller) this.running = null;
    if (this.messages !== conversation) return; // a new chat was begun meanwhile
    saveConversation(conversation);
    this.refresh();
    byId("announcer").textContent = reply.note || "The reply is complete.";
  }

  endWith(error, reply, conversation) {
    reply.note = error.name === "AbortError" ? "Stopped" : "Not complete";
    if (!reply.content && error.name !== "AbortError") conversation.pop();
    if (error.name !== "AbortError" && this.messages === conversation) this.showProblem(error);
  }

  showProblem(error) {
    if (!(error instanceof ApiError)) console.error(error);
    if (error.status === 401) {
      byId("key-hint").textContent = apiKey.get() ? "The server did not accept that key." : "It is kept until this tab is closed.";
      apiKey.forget();
      byId("key-form").hidden = false;
      byId("key").focus();
      return;
    }
    byId("problem-text").textContent = explain(error);
    byId("problem").hidden = false;
    if (error.status === 503 || error.status === 0) this.connect();
  }

  // --- the page -------------------------------------------------------------------------------------------------

  refresh() {
    this.view.show(this.messages, this.running !== null);
    this.refreshControls();
  }

  refreshControls() {
    const streaming = this.running !== null;
    byId("send").hidden = streaming;
    byId("send").disabled = !this.ready || !this.input.value.trim();
    byId("stop").hidden = !streaming;
    for (const button of byId("suggestions").children) button.disabled = !this.ready;
    const used = this.messages.findLast(({ stats }) => stats?.contextTokens)?.stats.contextTokens;
    const limit = this.model?.max_model_len;
    byId("context").textContent = used && limit ? `${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens of context` : "";
  }

  sizeInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
    this.refreshControls();
  }
}

/** Times one reply. Token counts are the server's; until it has sent one, each piece of text counts as a token. */
class Meter {
  constructor() {
    this.begun = performance.now();
    this.first = null;
    this.last = null;
    this.pieces = 0;
    this.counted = null;
  }

  text() {
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
    return this.stats();
  }

  usage(usage) {
    this.counted = usage;
    return this.stats();
  }

  stats() {
    const tokens = this.counted?.completion_tokens ?? this.pieces;
    const seconds = (this.last - this.first) / 1000;
    return {
      tokens,
      firstTokenMs: this.first === null ? null : this.first - this.begun,
      tokensPerSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      cachedTokens: this.counted?.prompt_tokens_details?.cached_tokens ?? null,
      contextTokens: this.counted?.total_tokens ?? null,
    };
  }
}

function explain(error) {
  if (!(error instanceof ApiError)) return "Something on this page went wrong. The browser's console says what.";
  if (error.code === "context_length_exceeded") return "This conversation has become longer than the model can read. Begin a new chat, or edit your last message.";
  if (error.status === 429) return `The server is busy. Try again${error.retryAfter ? ` in ${error.retryAfter} s` : " in a moment"}.`;
  return error.message;
}

const percent = (fraction) => (fraction === null || fraction < 0 ? "" : `${Math.round(fraction * 100)} %`);

function oncePerFrame(action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      action();
    });
  };
}

new Chat();
