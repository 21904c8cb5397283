// What stands where there is nothing to show: why, and what would bring it.
import type { ComponentChildren } from "preact";

export function Failure({ text }: { text: string | null }) {
  return text ? (
    <p role="alert" class="failure">
      {text}
    </p>
  ) : null;
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

export function Loading() {
  return (
    <p class="empty loading" role="status">
      Loading…
    </p>
  );
}
