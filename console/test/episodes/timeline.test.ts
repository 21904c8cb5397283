import { expect, test } from "vitest";
import { ticksOf, timelineOf, type CallTimes } from "../../src/episodes/timeline";

const call = (id: string, received_at: number, seconds: number, more: Partial<CallTimes> = {}): CallTimes => ({
  ...{ call_id: id, received_at, seconds, queued_s: null, first_token_s: 0, lineage: 0 },
  ...more,
});

test("a call's time is cut at its engine and at its first token, and the rest is the agent's", () => {
  const calls = [call("a", 100, 4, { queued_s: 1, first_token_s: 1.5 }), call("b", 107, 1)];
  const { bars, totals, seconds } = timelineOf(calls, 100, 110);
  expect(bars).toEqual([
    { phase: "waiting", from: 0, to: 1, lane: 0, call_id: "a" },
    { phase: "prefill", from: 1, to: 1.5, lane: 0, call_id: "a" },
    { phase: "sampling", from: 1.5, to: 4, lane: 0, call_id: "a" },
    { phase: "tool", from: 4, to: 7, lane: 0, call_id: "b" },
    { phase: "sampling", from: 7, to: 8, lane: 0, call_id: "b" },
    { phase: "tool", from: 8, to: 10, lane: 0, call_id: "" },
  ]);
  expect(totals).toEqual({ waiting: 1, prefill: 0.5, sampling: 3.5, tool: 5 });
  expect(seconds).toBe(10);
});

test("calls that overlap have lanes of their own, in which no bars overlap", () => {
  const calls = [call("a", 0, 5), call("b", 1, 5, { lineage: 1 }), call("c", 2, 1, { lineage: 2 }), call("d", 6, 1)];
  const { bars, lanes } = timelineOf(calls, 0, null);
  expect(lanes).toBe(3);
  for (let lane = 0; lane < lanes; lane++) {
    const own = bars.filter((bar) => bar.lane === lane).sort((x, y) => x.from - y.from);
    for (let i = 1; i < own.length; i++) expect(own[i]!.from).toBeGreaterThanOrEqual(own[i - 1]!.to);
  }
});

test("a conversation that begins while nothing runs was begun by the agent", () => {
  const { bars } = timelineOf([call("a", 1, 2), call("b", 5, 1, { lineage: 1 })], 0, 6);
  expect(bars.filter((bar) => bar.phase === "tool").map(({ from, to }) => [from, to])).toEqual([[0, 1], [3, 5]]);
});

test("clocks that disagree give no bar of negative length", () => {
  const { bars } = timelineOf([call("a", 99, 1, { queued_s: 3, first_token_s: 9 })], 100, 100);
  for (const bar of bars) expect(bar.to).toBeGreaterThan(bar.from);
});

test.each([
  [12, [0, 2, 4, 6, 8, 10, 12]],
  [0.3, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]],
  [0, [0]],
])("the axis of %d s has round places", (seconds, ticks) => {
  expect(ticksOf(seconds)).toEqual(ticks);
});
