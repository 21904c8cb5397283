// Keyboard shortcuts: one listener, a registry that the help shows. Keys typed into a field are the field's.
import { useEffect } from "preact/hooks";

export interface Shortcut {
  /** "?", "/", "j", or two in a row: "g r". */
  keys: string;
  text: string;
  act: () => void;
}

export const shortcuts = new Set<Shortcut>();
let begun = "";
let forget = 0;

export function press(event: KeyboardEvent): void {
  const target = event.target as HTMLElement | null;
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (target?.closest?.("input, textarea, select, [contenteditable], dialog[open]")) return;
  const typed = begun ? `${begun} ${event.key}` : event.key;
  begun = "";
  clearTimeout(forget);
  const found = [...shortcuts].reverse().find((shortcut) => shortcut.keys === typed);
  if (found) {
    event.preventDefault();
    found.act();
  } else if ([...shortcuts].some((shortcut) => shortcut.keys.startsWith(`${event.key} `))) {
    begun = event.key;
    forget = window.setTimeout(() => (begun = ""), 1_500);
  }
}

/** Shortcuts that hold while the component is there. */
export function useShortcuts(list: Shortcut[], deps: readonly unknown[] = []): void {
  useEffect(() => {
    for (const one of list) shortcuts.add(one);
    return () => {
      for (const one of list) shortcuts.delete(one);
    };
  }, deps);
}
