// The server's HTTP interface as this page uses it: readiness, models, one streamed chat completion.

/** What the server refused, in its own words. `status` is 0 if it did not answer at all. */
export class ApiError extends Error {
  constructor(status, message, code = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

const KEY = "pagemill.key";

/** The API key lives as long as the tab. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

async function call(path, options = {}) {
  const headers = { "content-type": "application/json" };
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const message = body?.error?.message ?? `The server answered ${response.status}.`;
  return new ApiError(response.status, message, body?.error?.code ?? null, Number(response.headers.get("retry-after")) || null);
}

/** `{ready, phase, progress, detail, reachable}`; needs no key. */
export async function readiness() {
  try {
    const response = await fetch("readyz", { cache: "no-store" });
    const body = await response.json().catch(() => ({}));
    return { ready: response.ok, reachable: true, status: body.status, phase: body.phase ?? "", progress: body.progress ?? null, detail: body.detail ?? "" };
  } catch {
    return { ready: false, reachable: false, status: "unreachable", phase: "", progress: null, detail: "" };
  }
}

/** The first model: `{id, max_model_len}`. */
export async function firstModel() {
  const { data } = await (await call("v1/models")).json();
  return data[0];
}

/**
 * Streams one reply. Calls `onText(text)` and `onUsage(usage)` as they come; returns the finish reason.
 * Throws ApiError for a refusal, an error in the stream or a reply that the server broke off, AbortError if `signal` is raised.
 */
export async function streamReply(body, { signal, onText, onUsage }) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const payload = JSON.stringify({ ...body, stream: true, stream_options: options });
  const response = await call("v1/chat/completions", { method: "POST", body: payload, signal });
  let finishReason = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      if (finishReason === "abort") throw new ApiError(0, "The server broke the reply off before it was complete.");
      return finishReason;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error.message, chunk.error.code);
    const choice = chunk.choices[0];
    if (choice?.delta?.content) onText(choice.delta.content);
    if (choice?.finish_reason) finishReason = choice.finish_reason;
    if (chunk.usage) onUsage(chunk.usage);
  }
  throw new ApiError(0, "The connection broke before the reply was complete.");
}

/** The `data` of server-sent events. Comments (keep-alive) are skipped. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke before the reply was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
