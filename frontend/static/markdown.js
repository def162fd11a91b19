// Markdown as models write it, rendered to DOM nodes: paragraphs, headings, lists, quotes, tables, code, emphasis, links.
// Everything a model says ends up in text nodes. No HTML is parsed, so nothing in a reply can become markup or script.

import { copyFrom, element } from "./dom.js";

/** Splits text into top-level blocks. A block is `{kind, source, ...}`; equal sources render equally. */
export function splitBlocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [kind, end] = blockAt(lines, at);
    const own = lines.slice(at, end);
    blocks.push({ kind, lines: own, source: `${kind}\n${own.join("\n")}` });
    at = end;
  }
  return blocks;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const TABLE_RULE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?\s*)?$/;

function blockAt(lines, at) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) return ["code", endOfFence(lines, at + 1, fence[1])];
  if (HEADING.test(line)) return ["heading", at + 1];
  if (RULE.test(line)) return ["rule", at + 1];
  if (QUOTE.test(line)) return ["quote", endWhile(lines, at, (next) => QUOTE.test(next))];
  if (ITEM.test(line)) return ["list", endOfList(lines, at)];
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) return ["table", endWhile(lines, at, (next) => next.includes("|"))];
  return ["paragraph", endWhile(lines, at, (next, index) => next.trim() && (index === at || !startsBlock(next)))];
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function endWhile(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) end += 1;
  return end;
}

function endOfFence(lines, at, mark) {
  let end = at;
  while (end < lines.length && !isClosing(lines[end], mark)) end += 1;
  return Math.min(end + 1, lines.length);
}

function isClosing(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
}

/** A list goes on over blank lines if what follows is an item or indented, and over lines that continue an item. */
function endOfList(lines, at) {
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (line.trim()) {
      if (!ITEM.test(line) && !/^\s{2,}/.test(line) && startsBlock(line)) break;
      end += 1;
      continue;
    }
    const next = endWhile(lines, end, (text) => !text.trim());
    if (next >= lines.length || !(ITEM.test(lines[next]) || /^\s{2,}\S/.test(lines[next]))) break;
    end = next;
  }
  return end;
}

/** Quotes and lists inside each other end here; what is deeper is shown as it was written. */
const DEEPEST = 8;

/** Renders one block of `splitBlocks`. */
export function renderBlock({ kind, lines }, depth = 0) {
  if (depth > DEEPEST) return element("p", {}, lines.join("\n"));
  switch (kind) {
    case "code":
      return renderCode(lines);
    case "heading": {
      const [, marks, text] = lines[0].match(HEADING);
      return element(`h${Math.min(marks.length + 1, 6)}`, {}, ...inline(text));
    }
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...renderAll(lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1));
    case "list":
      return renderList(lines, depth + 1);
    case "table":
      return renderTable(lines);
    default:
      return element("p", {}, ...inlineLines(lines));
  }
}

export const renderAll = (text, depth = 0) => splitBlocks(text).map((block) => renderBlock(block, depth));

function renderCode(lines) {
  const [, mark, language] = lines[0].match(FENCE);
  const closed = lines.length > 1 && isClosing(lines[lines.length - 1], mark);
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", { type: "button", class: "quiet small", onclick: () => copyFrom(copy, code) }, "Copy");
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), copy);
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, code)));
}

function renderList(lines, depth) {
  const [, indent, mark] = lines[0].match(ITEM);
  const ordered = /\d/.test(mark);
  const start = ordered ? parseInt(mark, 10) : 1;
  const list = element(ordered ? "ol" : "ul", { start: start !== 1 ? String(start) : null });
  const loose = lines.some((line) => !line.trim());
  let own = [];
  const flush = () => {
    if (own.length) list.append(element("li", {}, ...renderItem(own, loose, depth)));
  };
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= indent.length + 1) {
      flush();
      own = [line.slice(item[0].length)];
    } else {
      own.push(line.replace(/^(\t| {1,4})/, ""));
    }
  }
  flush();
  return list;
}

/** An item's first paragraph stands in the item itself unless the list is loose. */
function renderItem(lines, loose, depth) {
  const blocks = splitBlocks(lines.join("\n"));
  return blocks.flatMap((block) => (block.kind === "paragraph" && !loose ? inlineLines(block.lines) : [renderBlock(block, depth)]));
}

function renderTable(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, name) => element("tr", {}, ...cells(line).map((cell) => element(name, {}, ...inline(cell))));
  const head = element("thead", {}, row(lines[0], "th"));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", { class: "table", tabindex: "0" }, element("table", {}, head, body));
}

/** Lines of a paragraph: a line break stays one, as models mean it. */
function inlineLines(lines) {
  return lines.flatMap((line, index) => (index ? [element("br"), ...inline(line.trim())] : inline(line.trim())));
}

const EMPHASIS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const WORD = /[\p{L}\p{N}]/u;
const LINK = /^\[([^\]\n]{1,500})\]\(<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\))?[^\s()<>]{0,2000})>?(?:\s+"[^"\n]{0,500}")?\)/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]{1,2000}/;

/** Inline markup to nodes, in one pass; a mark without its partner is plain text, and is searched for only once. */
export function inline(text, depth = 0) {
  const nodes = [];
  const hopeless = new Set();
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const found = depth < DEEPEST ? markAt(text, at, hopeless, depth) : null;
    if (!found) {
      plain += text[at];
      at += 1;
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(found.node);
    at = found.end;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function markAt(text, at, hopeless, depth) {
  const sign = text[at];
  if (sign === "\\" && /[\\`*_~[\]()#>|.!-]/.test(text[at + 1] ?? "")) return { node: text[at + 1], end: at + 2 };
  if (sign === "`") return codeAt(text, at, hopeless);
  if (sign === "[" || sign === "h") return linkAt(text, at, depth);
  if (sign === "*" || sign === "_" || sign === "~") return emphasisAt(text, at, hopeless, depth);
  return null;
}

function codeAt(text, at, hopeless) {
  const mark = text.slice(at).match(/^`+/)[0];
  const end = hopeless.has(mark) ? -1 : text.indexOf(mark, at + mark.length);
  if (end < 0) {
    hopeless.add(mark);
    return { node: mark, end: at + mark.length };
  }
  const code = text.slice(at + mark.length, end);
  const trimmed = code.trim() && /^ .* $/.test(code) ? code.slice(1, -1) : code;
  return { node: element("code", {}, trimmed), end: end + mark.length };
}

function linkAt(text, at, depth) {
  const rest = text.slice(at, at + 5000);
  const link = rest.match(LINK);
  if (link) {
    const href = safeAddress(link[2]);
    return href && { node: anchor(href, ...inline(link[1], depth + 1)), end: at + link[0].length };
  }
  const address = (at === 0 || !WORD.test(text[at - 1])) && rest.match(ADDRESS);
  if (!address) return null;
  const bare = address[0].replace(/[.,;:!?)\]*_]+$/, "");
  const href = safeAddress(bare);
  return href && { node: anchor(href, bare), end: at + bare.length };
}

const anchor = (href, ...children) => element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);

/** The address if it leads to a page or a mailbox; null for `javascript:` and everything else. */
function safeAddress(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function emphasisAt(text, at, hopeless, depth) {
  for (const [mark, name] of EMPHASIS) {
    if (!text.startsWith(mark, at) || hopeless.has(mark) || !opens(text, at, mark)) continue;
    const end = closing(text, at + mark.length, mark);
    if (end < 0) hopeless.add(mark);
    else return { node: element(name, {}, ...inline(text.slice(at + mark.length, end), depth + 1)), end: end + mark.length };
  }
  return null;
}

/** `2 * 3` and `snake_case` open nothing. */
function opens(text, at, mark) {
  const before = text[at - 1] ?? " ";
  const after = text[at + mark.length] ?? " ";
  return /\S/.test(after) && !(mark[0] === "_" && WORD.test(before));
}

function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at >= 0; at = text.indexOf(mark, at + 1)) {
    const single = mark.length === 1 && (text[at + 1] === mark || text[at - 1] === mark);
    const inWord = mark[0] === "_" && WORD.test(text[at + mark.length] ?? " ");
    if (!single && !inWord && /\S/.test(text[at - 1])) return at;
  }
  return -1;
}
