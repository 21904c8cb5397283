/** An episode's calls in time: what each waited for, and what the agent did in between. Pure.
 *
 * A call's time is cut into waiting (no engine had it), prefill (up to its first token) and sampling. The agent's own time, with its
 * tools, is what lies between two calls of a conversation; and before and after the others, where no call runs at all.
 * Calls that overlap are on lanes of their own.
 */

export interface CallTimes {
  call_id: string;
  /** Seconds since 1970. */
  received_at: number;
  /** Seconds until an engine had it; null: not known, then waiting is part of prefill. */
  queued_s: number | null;
  /** Seconds until its first token; null: it sampled none, or an upstream model answered immediately. */
  first_token_s: number | null;
  seconds: number;
  /** The turn's conversation, for the agent's time between calls; null: none. */
  lineage: number | null;
}

export type Phase = "waiting" | "prefill" | "sampling" | "tool";

export interface Bar {
  phase: Phase;
  /** Seconds since the episode's beginning. */
  from: number;
  to: number;
  lane: number;
  /** A call; for `tool`: the call after it, empty at the end. */
  call_id: string;
}

export interface Timeline {
  bars: Bar[];
  lanes: number;
  seconds: number;
  /** Seconds by phase, over all calls. */
  totals: Record<Phase, number>;
}

export function timelineOf(calls: readonly CallTimes[], begun: number, ended: number | null): Timeline {
  const sorted = [...calls].sort((a, b) => a.received_at - b.received_at);
  const bars: Bar[] = [];
  const busy: number[] = [];
  const last = new Map<number, { at: number; lane: number }>();
  let idle = { at: 0, lane: 0 }; // the end of all that ran so far
  let seconds = ended === null ? 0 : Math.max(ended - begun, 0);
  for (const call of sorted) {
    const from = Math.max(call.received_at - begun, 0);
    const to = from + Math.max(call.seconds, 0);
    const before = (call.lineage === null ? undefined : last.get(call.lineage)) ?? (idle.at <= from ? idle : undefined);
    // A conversation keeps its lane where it can, so that its waits and tools read from left to right.
    let lane = before && (busy[before.lane] ?? 0) <= from ? before.lane : busy.findIndex((until) => until <= from);
    if (lane < 0) lane = busy.length;
    if (before && before.at < from) bars.push({ phase: "tool", from: before.at, to: from, lane, call_id: call.call_id });
    for (const [phase, start, end] of phasesOf(call, from, to)) {
      if (end > start) bars.push({ phase, from: start, to: end, lane, call_id: call.call_id });
    }
    busy[lane] = to;
    if (call.lineage !== null) last.set(call.lineage, { at: to, lane });
    if (to >= idle.at) idle = { at: to, lane };
    seconds = Math.max(seconds, to);
  }
  if (sorted.length && idle.at < seconds) bars.push({ phase: "tool", from: idle.at, to: seconds, lane: idle.lane, call_id: "" });
  const totals: Record<Phase, number> = { waiting: 0, prefill: 0, sampling: 0, tool: 0 };
  for (const bar of bars) totals[bar.phase] += bar.to - bar.from;
  return { bars, lanes: Math.max(busy.length, 1), seconds, totals };
}

function phasesOf(call: CallTimes, from: number, to: number): [Phase, number, number][] {
  const queued = Math.min(from + Math.max(call.queued_s ?? 0, 0), to);
  const first = call.first_token_s === null ? to : Math.min(Math.max(from + call.first_token_s, queued), to);
  return [
    ["waiting", from, queued],
    ["prefill", queued, first],
    ["sampling", first, to],
  ];
}

/** Round places for an axis from 0 to `seconds`: about `count` of them. */
export function ticksOf(seconds: number, count = 8): number[] {
  if (!(seconds > 0)) return [0];
  const rough = seconds / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough)!;
  return Array.from({ length: Math.floor(seconds / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(12)));
}
