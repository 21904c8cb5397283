import type { ComponentChildren } from "preact";

export type Tone = "plain" | "good" | "warn" | "bad" | "info";

/** A word in a colored field. The word says it all: color alone tells nothing. */
export function Badge({ tone = "plain", children, title }: { tone?: Tone; children: ComponentChildren; title?: string }) {
  return (
    <span class={`badge ${tone}`} title={title}>
      {children}
    </span>
  );
}
