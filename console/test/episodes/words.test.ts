import { expect, test } from "vitest";
import { askAgain, quoted } from "../../src/episodes/curl";
import { linked, number, seconds } from "../../src/episodes/words";
import { drawn } from "./fixture";

test("batches and versions in a sentence are links, and the sentence stays as it is", () => {
  const parts = linked("its group moved from batch 3 to batch 4, of version 2");
  expect(parts.map((part) => part.text).join("")).toBe("its group moved from batch 3 to batch 4, of version 2");
  expect(parts.filter((part) => part.href).map((part) => [part.text, part.href])).toEqual([
    ["batch 3", "#/staleness"],
    ["batch 4", "#/staleness"],
    ["version 2", "#/episodes?version=2"],
  ]);
  expect(linked("trained in batch 3 as version 4").map((part) => part.href)).toEqual([undefined, "#/episodes?batch=3", undefined, "#/episodes?version=4"]);
});

test("a shell reads a quoted word as it was", () => {
  expect(quoted("it's")).toBe(`'it'\\''s'`);
  expect(quoted("http://127.0.0.1:8000/v1")).toBe("http://127.0.0.1:8000/v1");
});

test("a call is asked again with the ids before it, also where it leaves the middle of a node", () => {
  const table = drawn([
    [-1, 0, false, ["a", "b", "c"]],
    [0, 2, true, ["d", "e"]],
  ]);
  const used = { temperature: 0.7, seed: null, top_p: 1, bridged: true };
  const command = askAgain("http://host", table, { call_id: "call-1", model: "demo", node: 1, used });
  const body = JSON.parse(command.slice(command.indexOf("'{") + 1, command.lastIndexOf("'")));
  expect(body).toEqual({ model: "demo", prompt: [100, 101], max_tokens: 2, temperature: 0.7, top_p: 1 });
  expect(command).not.toContain("Bearer sk");
});

test.each([
  [0.0123, "12 ms"],
  [4.5, "4.50 s"],
  [75, "1 min 15 s"],
  [7260, "2 h 1 min"],
])("%d seconds are %s", (value, words) => {
  expect(seconds(value)).toBe(words);
});

test("a figure that is not there is a dash, and a tiny one keeps its size", () => {
  expect([null, NaN, 0, -0.25, 0.00001234].map((value) => number(value))).toEqual(["–", "–", "0", "-0.25", "1.23e-5"]);
});
