import type { ComponentChildren } from "preact";

export type Tone = "plain" | "good" | "warn" | "bad" | "info";

/** A word in a colored field. The word has the whole meaning; the color repeats it. */
export function Badge({ tone = "plain", children, title }: { tone?: Tone; children: ComponentChildren; title?: string }) {
  return (
    <span class={`badge ${tone}`} title={title}>
      {children}
    </span>
  );
}
