import { expect, test } from "vitest";
import { tickLabels } from "../src/parts/chart";
import { share, short } from "../src/format";
import type { Steps } from "../src/run/steps";
import { ends, evaluated, trendOf, verdict, type Evaluation } from "../src/run/trend";

const N = 30;
const run = (reward: (i: number) => number, figures: Steps["figures"] = {}): Steps => {
  const numbers = Array.from({ length: N }, (_, i) => i + 1);
  return { model: "m", run: "r", every: 1, step: numbers, version: numbers, at: numbers.map((i) => 100 + i), figures: { reward_mean: numbers.map(reward), ...figures } };
};
const evaluation = (version: number, reward_mean: number, episodes = 200): Evaluation => ({ version, episodes, reward_mean, reward_std: 0.45, at: 90 + version });
const noise = (i: number) => ((i * 7) % 5) / 50;

test("evaluation episodes are points of the steps that made their version, and of a step 0 for the version before", () => {
  const found = evaluated(run(() => 0.5), [evaluation(0, 0.46), evaluation(30, 0.8)]);
  expect([found.step[0], found.version[0], found.at[0], found.figures["reward_mean"]![0]]).toEqual([0, 0, 90, null]);
  const points = found.figures["eval/reward_mean"]!;
  expect([points.length, points[0], points[1], points.at(-1)]).toEqual([N + 1, 0.46, null, 0.8]);
});

test("the trainer's own figure of a step stays, and versions of other runs are left out", () => {
  const own = run(() => 0.5, { "eval/reward_mean": [...new Array(N - 1).fill(null), 0.7] });
  const found = evaluated({ ...own, version: own.version.map((version) => version! + 40) }, [evaluation(2, 0.1), evaluation(70, 0.9)]);
  expect(found.figures["eval/reward_mean"]!.filter((value) => value !== null)).toEqual([0.7]);
  expect(found.step).toHaveLength(N);
});

test("a version that several steps left in place has one point", () => {
  const found = evaluated({ ...run(() => 0.5), version: [1, 1, ...new Array(N - 2).fill(2)] }, [evaluation(1, 0.4)]);
  expect(found.figures["eval/reward_mean"]!.slice(0, 3)).toEqual([0.4, null, null]);
});

test("a trend is a slope that is clear of the noise", () => {
  const column = (by: number) => Array.from({ length: N }, (_, i) => 0.4 + by * i + noise(i));
  expect([trendOf(column(0.01)), trendOf(column(-0.01)), trendOf(column(0)), trendOf([1, 2, 3, 4])]).toEqual(["rising", "falling", "flat", null]);
});

test("the ends of a column are means of its first and last values, never of the same ones", () => {
  expect([ends([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), ends([1, null, 3]), ends([1]), ends([0.4, 0.6, 0.8], 1)]).toEqual([[3, 8], [1, 3], null, [0.4, 0.8]]);
});

test("the answer is the evaluation's, and the training reward's where none is known", () => {
  const rising = run((i) => 0.4 + i / 100 + noise(i));
  const both = [evaluation(0, 0.46), evaluation(30, 0.8)];
  expect(verdict(evaluated(rising, both), both)).toEqual({
    words: "Held out 0.46 to 0.8, rising over 30 steps. Training reward 0.47 to 0.72, rising.",
    tone: "good",
  });
  expect(verdict(rising, [])!.words).toBe("Training reward 0.47 to 0.72, rising over 30 steps.");
});

test("a difference within its standard error is none, and a held-out reward that falls is bad whatever the training says", () => {
  const rising = run((i) => 0.4 + i / 100 + noise(i));
  const small = [evaluation(0, 0.46, 20), evaluation(30, 0.56, 20)];
  expect(verdict(evaluated(rising, small), small)!.words).toContain("Held out 0.46 to 0.56, no clear change over 30 steps.");
  const worse = [evaluation(0, 0.8), evaluation(30, 0.46)];
  expect(verdict(evaluated(rising, worse), worse)!.tone).toBe("bad");
});

test("without enough steps there is no trend, and without figures no answer", () => {
  const short = { ...run(() => 0.5), step: [1, 2], version: [1, 2], at: [1, 2], figures: { reward_mean: [0.4, 0.5] } };
  expect(verdict(short, [])).toEqual({ words: "Training reward 0.5 after 2 steps: too few to see a trend.", tone: "plain" });
  expect(verdict({ ...short, figures: {} }, [])).toBeNull();
});

test("the labels of an axis are distinct", () => {
  expect(tickLabels([0.9998, 0.9999, 1], short)).toEqual(["0.9998", "0.9999", "1"]);
  expect(tickLabels([0.5, null, 1], short)).toEqual(["0.5", "", "1"]);
  expect(tickLabels([0.501, 0.502], share)).toEqual(["50 %", ""]);
});
