// The conversation on the screen. While a reply streams, only the blocks that changed are rendered again,
// so that selecting text and reading code above is not disturbed.

import { byId, copyFrom, element } from "./dom.js";
import { renderBlock, splitBlocks } from "./markdown.js";

/** Within this many pixels of the end, the view follows the text. */
const NEAR = 60;

export class View {
  /** `actions`: `{regenerate(), edit()}`. */
  constructor(actions) {
    this.actions = actions;
    this.list = byId("messages");
    this.scroller = byId("scroller");
    this.following = true;
    this.lastTop = 0;
    this.rendered = []; // of the streaming reply: {source, node}
    this.scroller.addEventListener("scroll", () => this.noteScroll(), { passive: true });
    this.scroller.addEventListener("wheel", (event) => (this.following &&= event.deltaY >= 0), { passive: true }); // comes before the scrolling
    byId("jump").addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.keepUp()).observe(this.list);
    new ResizeObserver(() => this.keepUp()).observe(this.scroller);
  }

  /** Shows a conversation from scratch. */
  show(messages, streaming) {
    const last = messages.length - 1;
    const lastOwn = messages.findLastIndex(({ role }) => role === "user");
    this.list.replaceChildren(
      ...messages.map((message, index) =>
        message.role === "user"
          ? this.own(message, index === lastOwn && !streaming)
          : this.reply(message, index === last, index === last && streaming),
      ),
    );
    byId("welcome").hidden = messages.length > 0;
    this.keepUp();
  }

  own(message, editable) {
    const tools = element("div", { class: "tools" }, this.copyButton(message));
    if (editable) tools.append(element("button", { type: "button", class: "quiet small", onclick: () => this.actions.edit() }, "Edit"));
    const said = element("div", { class: "said" }, message.content);
    return element("li", { class: "message own" }, element("h2", { class: "visually-hidden" }, "You"), said, tools);
  }

  reply(message, isLast, streaming) {
    this.rendered = [];
    const text = element("div", { class: "text" });
    const stats = element("span", { class: "stats" });
    const tools = element("div", { class: "tools" });
    const node = element("li", { class: "message reply", "aria-busy": String(streaming) }, element("h2", { class: "visually-hidden" }, "Reply"), text);
    if (!streaming && message.content) tools.append(this.copyButton(message));
    if (!streaming && isLast) tools.append(element("button", { type: "button", class: "quiet small", onclick: () => this.actions.regenerate() }, "Regenerate"));
    node.append(element("div", { class: "after" }, stats, tools));
    this.fill(node, message);
    return node;
  }

  copyButton(message) {
    const button = element("button", { type: "button", class: "quiet small", onclick: () => copyFrom(button, message.content) }, "Copy");
    return button;
  }

  /** Brings the last reply up to date with its message. */
  update(message) {
    const node = this.list.lastElementChild;
    if (node) this.fill(node, message);
    this.keepUp();
  }

  fill(node, message) {
    const text = node.querySelector(".text");
    const blocks = splitBlocks(message.content);
    const same = blocks.findIndex((block, index) => this.rendered[index]?.source !== block.source);
    const keep = same < 0 ? blocks.length : same;
    for (const { node: stale } of this.rendered.splice(keep)) stale.remove();
    for (const block of blocks.slice(keep)) {
      const fresh = renderBlock(block);
      this.rendered.push({ source: block.source, node: fresh });
      text.append(fresh);
    }
    node.classList.toggle("empty", !message.content);
    node.querySelector(".stats").replaceChildren(...describe(message));
  }

  /** Moving up by however little lets go of the end; arriving near it again takes hold. */
  noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const distance = scrollHeight - scrollTop - clientHeight;
    if (scrollTop < this.lastTop && distance > 2) this.following = false;
    else if (distance < NEAR && scrollTop > this.lastTop) this.following = true;
    this.lastTop = scrollTop;
    byId("jump").hidden = distance < NEAR;
  }

  /** Stays at the end if the reader is there, and nowhere else. */
  keepUp() {
    if (!this.following) {
      byId("jump").hidden = false;
      return;
    }
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.lastTop = this.scroller.scrollTop; // so that the event which tells of this is not taken for the reader's scrolling
  }

  follow() {
    this.following = true;
    byId("jump").hidden = true;
    this.keepUp();
  }
}

/** The line under a reply: what it cost, and why it ended if not by itself. */
function describe({ stats, note }) {
  const parts = [];
  if (note) parts.push(element("span", { class: "note" }, note));
  if (stats?.tokens) {
    const { tokens, firstTokenMs, tokensPerSecond, cachedTokens } = stats;
    parts.push(element("span", { "data-stat": "tokens" }, `${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`));
    if (tokensPerSecond) parts.push(element("span", { "data-stat": "speed" }, `${tokensPerSecond.toFixed(1)} tokens/s`));
    if (firstTokenMs !== null) parts.push(element("span", { "data-stat": "first" }, `first token after ${duration(firstTokenMs)}`));
    if (cachedTokens !== null) parts.push(element("span", { "data-stat": "cached", title: "Tokens of the conversation that did not have to be computed again" }, `${cachedTokens.toLocaleString("en")} cached`));
  }
  return parts;
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
