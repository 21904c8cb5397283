/** A button that copies a text, and confirms it. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { messageOf } from "../api";

interface Props {
  label: string;
  text: () => string | Promise<string>;
  title?: string;
}

export function CopyButton({ label, text, title }: Props) {
  const notice = useSignal("");
  useEffect(() => {
    if (!notice.value) return;
    const timer = setTimeout(() => (notice.value = ""), 2_000);
    return () => clearTimeout(timer);
  }, [notice.value]);
  const copy = async () => {
    try {
      await write(await text());
      notice.value = "Copied";
    } catch (error) {
      notice.value = messageOf(error);
    }
  };
  return (
    <button type="button" title={title} onClick={() => void copy()}>
      <span aria-live="polite">{notice.value || label}</span>
    </button>
  );
}

/** Browsers give the clipboard to secure pages alone; a page of plain HTTP on another host copies from a field. */
async function write(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("The browser gives this page no clipboard");
}
