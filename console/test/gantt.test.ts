import { expect, test } from "vitest";
import { bars, rowsOf, spent } from "../src/gantt/rows";

const span = (what: string, from: number, to: number | null) => ({ what, reason: "", version: 1, from, to });

test("bars are cut at the window, and crowds of short ones are one", () => {
  const crowd = Array.from({ length: 50 }, (_, i) => span("held", 50 + i * 0.01, 50 + i * 0.01 + 0.005));
  const drawn = bars([span("starting", -20, -1), span("open", -5, 50), ...crowd, span("open", 60, null)], 0, 100, 0.01);
  expect(drawn.map((bar) => [bar.what, bar.left, Math.round(bar.width * 100)])).toEqual([
    ["open", 0, 50],
    ["held", 0.5, 1],
    ["open", 0.6, 40],
  ]);
});

test("time is summed by state within the window, what lasts until its end", () => {
  expect([...spent([span("open", -10, 10), span("held", 10, 12), span("open", 12, null)], 0, 20)]).toEqual([["open", 18], ["held", 2]]);
});

test("engines stand below their node, those of nodes that are not shown at the end", () => {
  const engine = (name: string, node: string | null) => ({ name, node, spans: [] });
  const told = { nodes: [{ name: "a", spans: [] }], engines: [engine("e2", "hidden"), engine("e1", "a"), engine("e3", null)] };
  expect(rowsOf(told).map((row) => row.name)).toEqual(["a", "e1", "e2", "e3"]);
});
