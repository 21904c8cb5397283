/** Filters that the reader has saved, in this browser alone. They are kept as the part of the address behind `?`. */

import { signal } from "@preact/signals";

const KEY = "headgate.filters";

function load(): string[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => typeof one === "string") : [];
  } catch {
    return []; // another program's value, or a browser that keeps nothing
  }
}

export const saved = signal<string[]>(load());

/** Saves a filter, or removes it where it is saved already. */
export function toggle(search: string): void {
  saved.value = saved.value.includes(search) ? saved.value.filter((one) => one !== search) : [...saved.value, search];
  try {
    localStorage.setItem(KEY, JSON.stringify(saved.value));
  } catch {
    // it stays for as long as the tab
  }
}

/** A filter in words: "reason agent_failed, version 3..5". */
export function wordsOf(search: string): string {
  const parts = [...new URLSearchParams(search)].filter(([name]) => name !== "since" && name !== "until");
  const words = parts.map(([name, value]) => `${name} ${value}`);
  return [...words, ...(/(^|&)(since|until)=/.test(search) ? ["a part of the time"] : [])].join(", ");
}
