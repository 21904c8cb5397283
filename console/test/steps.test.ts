import { expect, test } from "vitest";
import { rangeOf } from "../src/parts/chart";
import { infrastructure, phases, ratio } from "../src/run/plots";
import type { State } from "../src/run/health";
import { grown, joined, smoothed, type Steps } from "../src/run/steps";
import { summary } from "../src/views/health";

const STEPS: Steps = {
  model: "m",
  run: "r",
  every: 1,
  step: [1, 2],
  version: [1, 2],
  at: [10, 20],
  figures: { loss: [0.5, 0.4], trained_tokens: [100, 300], "seconds/total": [2, null] },
};

test("a told step is added, and an evaluation joins the step that it belongs to", () => {
  const three = grown(STEPS, { step: 3, version: 3, at: 30, figures: { loss: 0.3 } });
  expect([three.step, three.at, three.figures["loss"]]).toEqual([[1, 2, 3], [10, 20, 30], [0.5, 0.4, 0.3]]);
  const evaluated = grown(three, { step: 2, at: 31, figures: { "eval/reward_mean": 0.9 } });
  expect(evaluated.figures["eval/reward_mean"]).toEqual([null, 0.9, null]);
  expect([evaluated.at, evaluated.version]).toEqual([[10, 20, 30], [1, 2, 3]]);
});

test("two runs share an axis, and each has holes where the other alone was", () => {
  const { x, ofA, ofB } = joined([1, 3], [2, 3, 4]);
  expect([x, ofA([10, 30]), ofB([20, 33, 40])]).toEqual([[1, 2, 3, 4], [10, null, 30, null], [null, 20, 33, 40]]);
});

test("a running mean passes over what is not known", () => {
  expect(smoothed([2, null, 4, 6], 2)).toEqual([2, null, 4, 5]);
});

test("a share of failures is split by its reasons, and without reasons it is not known", () => {
  const figures = { excluded_share: [0.2, 0, null, 0.1], "excluded/agent_failed": [2, null, null, null], "excluded/time_limit": [1, null, null, null], "excluded/tool_failed": [1, null, null, null] };
  expect(infrastructure({ ...STEPS, figures })).toEqual([0.05, 0, null, null]);
});

test("a rate is not known where its time is not", () => {
  expect(ratio("trained_tokens", "seconds/total")(STEPS)).toEqual([50, null]);
});

test("a share that is 0 all the time is shown between 0 and 100 %, and others with some room", () => {
  expect(rangeOf(0, 0)).toEqual([0, 1]);
  const [low, high] = rangeOf(0.2, 0.6);
  expect(low!).toBeLessThan(0.2);
  expect(high!).toBeGreaterThan(0.6);
  expect(rangeOf(null, null)).toEqual([null, null]);
});

test("the summary of health counts what is not known apart from what is well", () => {
  const states = (...all: State[]) => summary(all.map((state) => ({ state })));
  expect(states("ok", "ok", "unknown")).toBe("All 2 known signals are in their healthy ranges. 1 signal not known.");
  expect(states("ok", "warn", "bad")).toBe("2 signals of 3 out of the healthy range.");
});

test("the chart of seconds has the figure of the whole step, and its longest phases", () => {
  const figures = { "seconds/total": [4, 5], "seconds/ack": [1, 1], "seconds/stream": [2, 3] };
  expect(phases({ ...STEPS, figures }).map((curve) => curve.label)).toEqual(["whole step", "stream", "ack"]);
});
