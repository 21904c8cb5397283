// What the timeline draws: a row for each node and engine, with spans that are wide enough to be seen. Pure.

export interface Span {
  /** An engine's state or a node's role. */
  what: string;
  reason: string;
  version: number | null;
  from: number;
  /** null: it lasts. */
  to: number | null;
}

export interface Row {
  name: string;
  kind: "node" | "engine";
  spans: Span[];
}

interface Timeline {
  engines: { name: string; node?: string | null; spans: { state: string; version: number | null; reason: string; from: number; to: number | null }[] }[];
  nodes: { name: string; spans: { role: string; reason: string; from: number; to: number | null }[] }[];
}

/** Nodes with their engines below them, then engines without a node. */
export function rowsOf(timeline: Timeline): Row[] {
  const engine = (one: Timeline["engines"][number]): Row => ({
    name: one.name,
    kind: "engine",
    spans: one.spans.map(({ state, ...rest }) => ({ what: state, ...rest })),
  });
  const nodes = new Set(timeline.nodes.map((node) => node.name));
  const below = (name: string) => timeline.engines.filter((one) => one.node === name).map(engine);
  const rows = timeline.nodes.flatMap((node): Row[] => [
    { name: node.name, kind: "node", spans: node.spans.map(({ role, ...rest }) => ({ what: role, version: null, ...rest })) },
    ...below(node.name),
  ]);
  return [...rows, ...timeline.engines.filter((one) => !one.node || !nodes.has(one.node)).map(engine)];
}

export interface Bar extends Span {
  /** From 0 to 1 of the width. */
  left: number;
  width: number;
}

/** The bars between two times. A span narrower than `least` (a share of the width) is drawn that wide, unless the bar before hides it. */
export function bars(spans: readonly Span[], from: number, to: number, least: number): Bar[] {
  const whole = to - from;
  const found: Bar[] = [];
  for (const span of spans) {
    const end = Math.min(span.to ?? to, to);
    const begin = Math.max(span.from, from);
    if (end < from || begin > to) continue;
    const left = (begin - from) / whole;
    const width = Math.max((end - begin) / whole, least);
    const before = found.at(-1);
    if (before && before.width <= least && left - before.left < least && width <= least) continue;
    found.push({ ...span, left, width: Math.min(width, 1 - left) });
  }
  return found;
}

/** Seconds in each state or role between two times. */
export function spent(spans: readonly Span[], from: number, to: number): Map<string, number> {
  const sums = new Map<string, number>();
  for (const span of spans) {
    const seconds = Math.min(span.to ?? to, to) - Math.max(span.from, from);
    if (seconds > 0) sums.set(span.what, (sums.get(span.what) ?? 0) + seconds);
  }
  return sums;
}
