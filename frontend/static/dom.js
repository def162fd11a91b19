// The smallest possible way to build elements. Text always goes in as text: nothing on this page parses HTML.

/** Makes an element: `element("a", {href: "..."}, "text", child)`. Attributes that are null or false are left out. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Copies text and says so on the button for a moment. */
export async function copyFrom(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copyBySelection(text) ? "Copied" : "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

/** Over plain HTTP from another machine browsers have no clipboard interface; the old way still works. */
function copyBySelection(text) {
  const area = element("textarea", { class: "visually-hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
