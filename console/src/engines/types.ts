// What the gateway reports about engines, nodes, calls and versions.

export interface Engine {
  name: string;
  model: string;
  state: string;
  reason: string;
  /** A person has paused it: it stays out of use until it is resumed. */
  paused: boolean;
  /** -1: not known. */
  version: number;
  streams: number;
  pinned: number;
  restarts: number;
  node: string | null;
  /** Seconds of a decode step: k3 for each call, k4 always. */
  speed: { k3: number; k4: number } | null;
}

export interface Node {
  name: string;
  tags: string[];
  role: string;
  reason: string;
  claimed_by: string | null;
  engines: string[];
  seconds: Record<string, number>;
}

export interface Call {
  call_id: string;
  episode_id: string;
  model: string;
  engine: string | null;
  tokens: number;
  pinned: boolean;
}

export interface Timeline {
  from: number;
  /** Now; of a recorded run its last event. */
  to: number;
  engines: { name: string; node: string | null; spans: { state: string; version: number | null; reason: string; from: number; to: number | null }[] }[];
  nodes: { name: string; spans: { role: string; reason: string; from: number; to: number | null }[] }[];
  versions: { model: string; version: number; published_at: number | null; live_at: number | null }[];
}

export interface Report {
  engine: string;
  streams: number;
  seconds: Record<string, number>;
  failure: string;
  /** What the engine holds, compared bit by bit; absent in runs that were recorded before. */
  proof?: { verdict: string; why: string } | null;
  probe: { verdict: string; gap: number; margin: number | null } | null;
}

export interface VersionRow {
  version: number;
  state: string;
  created_at: number;
  live_at: number | null;
  bad: string;
  report: Report[] | null;
}

/** One engine's way to one version. */
export interface Update {
  version: number;
  state: string;
  created_at: number;
  live_at: number | null;
  bad: string;
  engine: string;
  streams: number | null;
  seconds: Record<string, number>;
  proof: string;
  verdict: string;
  margin: number | null;
  gap: number | null;
  failure: string;
}

/** The start of a drawing: the requested one, or the first thing that is known since. */
export function beginOf(timeline: Timeline): number {
  const spans = [...timeline.engines, ...timeline.nodes].flatMap((row) => row.spans.map((span) => span.from));
  const first = Math.min(...spans, ...timeline.versions.map(({ live_at }) => live_at ?? Infinity));
  return Number.isFinite(first) ? Math.max(timeline.from, first) : timeline.from;
}

/** The end of a drawing: a recorded run of one moment has a width too. */
export const endOf = (timeline: Timeline) => Math.max(timeline.to, beginOf(timeline) + 1);

/** A row for each engine of each version, and one for a version that no engine reports. Only the newest live version is live now. */
export function updatesOf(versions: readonly VersionRow[]): Update[] {
  const live = versions.findLast((one) => one.state === "live")?.version;
  return versions.flatMap(({ version, state: stored, created_at, live_at, bad, report }): Update[] => {
    const state = stored === "live" && version !== live ? "replaced" : stored;
    const own = { version, state, created_at, live_at, bad };
    const none = { engine: "", streams: null, seconds: {}, proof: "", verdict: "", margin: null, gap: null, failure: "" };
    if (!report?.length) return [{ ...own, ...none }];
    return report.map((one) => ({
      ...own,
      engine: one.engine,
      streams: one.streams,
      seconds: one.seconds,
      proof: one.proof?.verdict ?? "",
      verdict: one.probe?.verdict ?? "",
      margin: one.probe?.margin ?? null,
      gap: one.probe?.gap ?? null,
      failure: one.failure,
    }));
  });
}
