// The settings drawer: what stands in its fields is what the next request uses.

import { byId } from "./dom.js";
import { DEFAULTS, loadSettings, saveSettings } from "./store.js";

const RANGES = ["temperature", "top_p"];
const NUMBERS = ["max_tokens", "seed"];

export class Settings {
  constructor() {
    this.dialog = byId("settings");
    this.values = loadSettings();
    byId("open-settings").addEventListener("click", () => this.dialog.showModal());
    byId("settings-form").addEventListener("input", () => this.read());
    byId("reset-settings").addEventListener("click", () => {
      this.values = { ...DEFAULTS };
      saveSettings(this.values);
      this.show();
    });
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // on the backdrop
    });
    this.show();
  }

  read() {
    const number = (name) => (Number.isInteger(byId(name).valueAsNumber) ? byId(name).valueAsNumber : null);
    this.values = { system: byId("system").value };
    for (const name of RANGES) this.values[name] = byId(name).valueAsNumber;
    for (const name of NUMBERS) this.values[name] = number(name);
    saveSettings(this.values);
    this.showRanges();
  }

  show() {
    byId("system").value = this.values.system;
    for (const name of [...RANGES, ...NUMBERS]) byId(name).value = this.values[name] ?? "";
    this.showRanges();
  }

  showRanges() {
    for (const name of RANGES) byId(`${name}-value`).textContent = this.values[name].toFixed(2);
  }
}
