import { expect, test } from "vitest";
import { classOf, coloringOf, MODES, surprise } from "../../src/episodes/scale";
import { drawn } from "./fixture";

const figures = (values: (number | null)[]) => ({
  ...{ run: "r", step: 4, batch: 3, version: 4, logprob: values, entropy: values, advantage: values },
  ...{ weight: values, mismatch: values, clipped: values.map(() => 0) },
});
const nodes: Parameters<typeof drawn>[0] = [
  [-1, 0, false, ["a"]],
  [0, 1, true, ["b", "c", "d"]],
];

test("a value falls between the bounds around it", () => {
  expect([-5, 0, 0.5, 1, 7].map((value) => classOf(value, [0, 1]))).toEqual([0, 0, 1, 1, 2]);
});

test("the less likely a token was, the higher its class", () => {
  expect([0, -0.005, -0.3, -3, -9].map(surprise)).toEqual([0, 0, 2, 5, 6]);
});

test("the legend counts each token once, and prompt tokens have no color", () => {
  const table = drawn(nodes, { trained: figures([null, -2, 0, 0.3]) });
  for (const mode of MODES.filter((one) => one !== "flag")) {
    const { cls, legend } = coloringOf(table, mode);
    expect(cls(0)).toBe("");
    expect(legend.reduce((sum, entry) => sum + entry.count, 0), mode).toBe(3);
    for (const token of [1, 2, 3]) expect(legend.map((entry) => entry.cls)).toContain(cls(token));
  }
});

test("signs of advantages have opposite ends of the scale", () => {
  const { cls } = coloringOf(drawn(nodes, { trained: figures([null, -2, 0, 2]) }), "advantage");
  expect([1, 2, 3].map(cls)).toEqual(["d0", "d3", "d6"]);
});

test("without figures of the trainer the reason is said", () => {
  expect(coloringOf(drawn(nodes), "entropy")).toMatchObject({ legend: [], nothing: "set [report] tokens_every" });
});

test("flags and masks are named", () => {
  const table = drawn(nodes, { flags: [0, 2, 6, 0], mask: [1, 0, 2, 2], mask_reasons: ["", "prompt", "late"] });
  expect(coloringOf(table, "flag").legend.map(({ label, count }) => [label, count])).toEqual([["truncated", 1], ["truncated + greedy", 1]]);
  expect(coloringOf(table, "mask").legend.map(({ label, count }) => [label, count])).toEqual([["trained, or may be", 1], ["late", 2]]);
});

test("a reply in the middle of which the weights changed has two colors", () => {
  const { cls, legend } = coloringOf(drawn(nodes, { version: [-1, 3, 3, 4] }), "version");
  expect(cls(1)).toBe(cls(2));
  expect(cls(3)).not.toBe(cls(1));
  expect(legend.map(({ label, count }) => [label, count])).toEqual([["version 3", 2], ["version 4", 1]]);
});

test("without figures by token, sampled tokens that may be trained have the advantage of their episode", () => {
  const table = drawn(nodes, { mask: [1, 0, 0, 1] });
  const { cls, nothing } = coloringOf(table, "advantage", -0.77);
  expect([nothing, ...[0, 1, 2, 3].map(cls)]).toEqual(["", "", "d1", "d1", ""]);
  expect(coloringOf(table, "advantage", null).nothing).toBe("set [report] tokens_every");
});
