// What the page remembers in this browser: the conversation and the settings. A browser that forbids it just forgets.

const CONVERSATION = "pagemill.conversation";
const SETTINGS = "pagemill.settings";

export const DEFAULTS = { system: "", temperature: 0.7, top_p: 1, max_tokens: null, seed: null };

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function save(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // Full or forbidden: the conversation goes on without being remembered.
  }
}

/** Messages are `{role, content, stats?, note?}`; `note` says why a reply is not complete. */
export function loadConversation() {
  const messages = load(CONVERSATION, []);
  return Array.isArray(messages) ? messages.filter((message) => typeof message?.content === "string") : [];
}

export const saveConversation = (messages) => save(CONVERSATION, messages);
export const loadSettings = () => ({ ...DEFAULTS, ...load(SETTINGS, {}) });
export const saveSettings = (settings) => save(SETTINGS, settings);

/** The request body for a conversation. Settings left empty are left to the server. */
export function requestBody(model, messages, settings) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = { model, messages: [...system, ...spoken(messages)], temperature: settings.temperature, top_p: settings.top_p };
  if (settings.max_tokens) body.max_tokens = settings.max_tokens;
  if (settings.seed !== null) body.seed = settings.seed;
  return body;
}

/** What was said, without replies that were stopped before their first word: turns alternate, as many templates demand. */
function spoken(messages) {
  const turns = [];
  for (const { role, content } of messages) {
    const last = turns.at(-1);
    if (!content) continue;
    if (last?.role === role) last.content += `\n\n${content}`;
    else turns.push({ role, content });
  }
  return turns;
}
